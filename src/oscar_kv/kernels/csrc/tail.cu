// The 16-bit tail of each row on the device: the counterpart of LayerState.append and of packing, for CUDA graphs. No
// length is known to the host; a step launches, with the pass's attention in between,
//
//   append -> attention (totals) -> plan_flush -> start_rows -> token_norms, encode_blocks (encode.cu) -> flush_tail
//
// and what follows append returns at once where no row is due. plan (3, rows) holds starts, counts and places of
// encode_blocks.
//
// Defines: KD, VD, DTYPE, KGROUP, THREADS.

#include "common.cuh"

constexpr int ITEM = DTYPE == DTYPE_F32 ? 4 : 2;               // bytes of a number of the model
constexpr int KEY_PIECES = KD * ITEM / 16, VALUE_PIECES = VD * ITEM / 16;  // 16 bytes each, of a token
constexpr int PIECES = KEY_PIECES + VALUE_PIECES;
constexpr float MIN_RANGE = 1.0f / 1024;                       // smallest relative range that equalization amplifies

struct Args {
    const u8 *keys, *values;                       // (rows, heads, tokens, D): new ones, or the ones to pack
    i64 key_row, key_head, value_row, value_head;  // strides in bytes
    int key_token, value_token;
    u8 *tail_keys, *tail_values;                   // (rows, heads, capacity, D)
    int* lengths;                                  // (rows): tokens in the tail before this pass
    int* totals;                                   // (rows): and with it
    int* num_blocks;                               // (rows): packed blocks
    int* plan;                                     // (3, rows)
    u8 *sink_keys, *sink_values;                   // (rows, heads, num_sinks, D)
    float* equalizer;                              // (rows, heads, KD), or null
    int rows, heads, tokens, capacity, residual_length, num_sinks;
    float exponent;                                // of the equalizer
};

__device__ __forceinline__ void copy_piece(u8* to, const u8* from) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// Grid (tokens, rows): one new token of a row, all heads. Its place is lengths + its number.
extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ Args a) {
    const int token = blockIdx.x, row = blockIdx.y, place = a.lengths[row] + token;
    if (token == 0 && threadIdx.x == 0) a.totals[row] = a.lengths[row] + a.tokens;
    if (place >= a.capacity) return;
    for (int i = threadIdx.x; i < a.heads * PIECES; i += THREADS) {
        const int head = i / PIECES, piece = i % PIECES;
        const i64 slot = ((i64)row * a.heads + head) * a.capacity + place;
        if (piece < KEY_PIECES) {
            const u8* from = a.keys + row * a.key_row + head * a.key_head + (i64)token * a.key_token;
            copy_piece(a.tail_keys + (slot * KEY_PIECES + piece) * 16, from + piece * 16);
        } else {
            const u8* from = a.values + row * a.value_row + head * a.value_head + (i64)token * a.value_token;
            const int other = piece - KEY_PIECES;
            copy_piece(a.tail_values + (slot * VALUE_PIECES + other) * 16, from + other * 16);
        }
    }
}

// One CTA: which rows have a complete block, and the lengths after it has been packed. A block is complete when
// residual_length tokens from its start on are there.
extern "C" __global__ void __launch_bounds__(THREADS) plan_flush(const __grid_constant__ Args a) {
    for (int row = threadIdx.x; row < a.rows; row += THREADS) {
        const int total = a.totals[row], due = total - (a.residual_length - BLOCK_TOKENS);
        const int count = due > 0 ? due / BLOCK_TOKENS : 0;
        a.plan[row] = 0;
        a.plan[a.rows + row] = count;
        a.plan[2 * a.rows + row] = a.num_blocks[row];
        a.num_blocks[row] += count;
        a.lengths[row] = total - BLOCK_TOKENS * count;
        a.totals[row] = a.lengths[row];
    }
}

__device__ __forceinline__ float number(const u8* from, int i) {
    if constexpr (DTYPE == DTYPE_F32) return reinterpret_cast<const float*>(from)[i];
    u16 bits = reinterpret_cast<const u16*>(from)[i];
    return DTYPE == DTYPE_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// Grid (heads, rows): what belongs to the first block of a sequence, its sinks and its equalization vector, for rows
// whose next block that is. The vector: mean over groups of (max - min) of each channel, by its mean over channels, to
// the power of `exponent`; without sinks and tokens that are not finite.
extern "C" __global__ void __launch_bounds__(THREADS) start_rows(const __grid_constant__ Args a) {
    __shared__ u32 excluded[BLOCK_TOKENS / 32];
    __shared__ float ranges[KD], total;
    const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x;
    if (a.plan[a.rows + row] == 0 || a.plan[2 * a.rows + row] != 0) return;
    const i64 index = (i64)row * a.heads + head;
    const u8* keys = a.keys + row * a.key_row + head * a.key_head + (i64)a.plan[row] * a.key_token;
    const u8* values = a.values + row * a.value_row + head * a.value_head + (i64)a.plan[row] * a.value_token;
    for (int i = thread; i < a.num_sinks * PIECES; i += THREADS) {
        const int token = i / PIECES, piece = i % PIECES, other = piece - KEY_PIECES;
        const i64 slot = index * a.num_sinks + token;
        if (piece < KEY_PIECES)
            copy_piece(a.sink_keys + (slot * KEY_PIECES + piece) * 16, keys + (i64)token * a.key_token + piece * 16);
        else
            copy_piece(
                a.sink_values + (slot * VALUE_PIECES + other) * 16, values + (i64)token * a.value_token + other * 16);
    }
    if (a.equalizer == nullptr) return;

    if (thread < BLOCK_TOKENS / 32) {
        const int sinks = a.num_sinks - 32 * thread;
        excluded[thread] = sinks <= 0 ? 0 : sinks >= 32 ? ALL_LANES : (1u << sinks) - 1;
    }
    __syncthreads();
    for (int i = thread; i < BLOCK_TOKENS * KD; i += THREADS) {
        const int token = i / KD;
        const float x = number(keys + (i64)token * a.key_token, i % KD);
        if (!is_finite(x)) atomicOr(&excluded[token / 32], 1u << token % 32);
    }
    __syncthreads();
    for (int c = thread; c < KD; c += THREADS) {
        float sum = 0.0f;
        for (int first = 0; first < BLOCK_TOKENS; first += KGROUP) {
            float low = infinity(), high = -infinity();
            for (int token = first; token < first + KGROUP; token++) {
                const float x = number(keys + (i64)token * a.key_token, c);
                if (excluded[token / 32] >> token % 32 & 1) continue;
                low = fminf(low, x), high = fmaxf(high, x);
            }
            sum += fmaxf(high - low, 0.0f);
        }
        ranges[c] = sum / (BLOCK_TOKENS / KGROUP);
    }
    __syncthreads();
    if (thread == 0) {  // a few hundred additions, once in the life of a sequence
        float sum = 0.0f;
        for (int c = 0; c < KD; c++) sum += ranges[c];
        total = sum / KD;
    }
    __syncthreads();
    for (int c = thread; c < KD; c += THREADS) {
        float relative = ranges[c] / total;
        if (!is_finite(relative)) relative = 1.0f;  // all channels constant, or overflow
        relative = fmaxf(relative, MIN_RANGE);
        a.equalizer[index * KD + c] = a.exponent == 0.5f ? sqrtf(relative) : powf(relative, a.exponent);
    }
}

// Grid (heads, rows): move what is left of the tail to its front. In steps of the gap, so that none overlaps itself.
extern "C" __global__ void __launch_bounds__(THREADS) flush_tail(const __grid_constant__ Args a) {
    const int head = blockIdx.x, row = blockIdx.y, gap = BLOCK_TOKENS * a.plan[a.rows + row], left = a.lengths[row];
    if (gap == 0) return;
    const i64 first = ((i64)row * a.heads + head) * a.capacity;
    for (int to = 0; to < left; to += gap) {
        const int tokens = min(gap, left - to);
        u8* keys = a.tail_keys + (first + to) * KEY_PIECES * 16;
        u8* values = a.tail_values + (first + to) * VALUE_PIECES * 16;
        for (int i = threadIdx.x; i < tokens * KEY_PIECES; i += THREADS)
            copy_piece(keys + i * 16, keys + ((i64)gap * KEY_PIECES + i) * 16);
        for (int i = threadIdx.x; i < tokens * VALUE_PIECES; i += THREADS)
            copy_piece(values + i * 16, values + ((i64)gap * VALUE_PIECES + i) * 16);
        __syncthreads();
    }
}
