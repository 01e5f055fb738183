// The 16-bit tail of each row on the device: the counterpart of LayerState.append and of packing, for CUDA graphs. No
// length is known to the host; a step launches
//
//   append -> attention (lengths + new tokens) -> flush
//
// and flush returns at once where no row has a complete block. Defines: those of encode.cuh.

#include "encode.cuh"
#include "start.cuh"

// Grid (tokens, rows): one new token of a row, all heads. Its place is lengths + its number.
extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ Args a) {
    allow_launch();
    wait_for_launch();
    const int token = blockIdx.x, row = blockIdx.y, place = a.lengths[row] + token;
    if (token == 0 && threadIdx.x == 0) {
        a.totals[row] = a.lengths[row] + a.tokens;
        if (row == 0) *a.barrier = 0;
    }
    if (place >= a.capacity) return;
    for (int i = threadIdx.x; i < a.heads * PIECES; i += THREADS) {
        const int head = i / PIECES, piece = i % PIECES, other = piece - KEY_PIECES;
        const i64 slot = ((i64)row * a.heads + head) * a.capacity + place;
        const u8* key = a.keys + row * a.key_row + head * a.key_head + (i64)token * a.key_token;
        const u8* value = a.values + row * a.value_row + head * a.value_head + (i64)token * a.value_token;
        if (piece < KEY_PIECES)
            copy_piece(a.tail_keys + (slot * KEY_PIECES + piece) * 16, key + piece * 16);
        else
            copy_piece(a.tail_values + (slot * VALUE_PIECES + other) * 16, value + other * 16);
    }
}

// All CTAs of a cooperative grid wait for each other. `arrived` is 0 before the first time.
__device__ __forceinline__ void grid_barrier(u32* arrived) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u32 last = (atomicAdd(arrived, 1) / gridDim.x + 1) * gridDim.x;
        while (*reinterpret_cast<volatile u32*>(arrived) < last) {}
        __threadfence();
    }
    __syncthreads();
}

// Blocks of a row that are complete: residual_length tokens from their start on are there.
__device__ __forceinline__ int complete_blocks(const Args& a, int row) {
    return max(0, a.totals[row] - (a.residual_length - BLOCK_TOKENS)) / BLOCK_TOKENS;
}

// Move what is left of one head's tail to its front. In steps of the gap, so that none overlaps itself.
__device__ __forceinline__ void move_tail(const Args& a, int row, int head) {
    const int gap = BLOCK_TOKENS * a.counts[row], left = a.totals[row] - gap;
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

// A cooperative grid of any size. keys and values are the tail; plan (3, rows) becomes starts, counts and places.
extern "C" __global__ void __launch_bounds__(THREADS, 1) flush(const __grid_constant__ Args a) {
    bool due = false, fresh = false, rest = false;  // some row packs a block, its first one, has tokens left
    for (int row = threadIdx.x; row < a.rows; row += THREADS) {
        const int count = complete_blocks(a, row), left = a.totals[row] - BLOCK_TOKENS * count;
        due |= count > 0, fresh |= count && a.num_blocks[row] == 0, rest |= count && left;
        if (blockIdx.x == 0) a.lengths[row] = left;
    }
    due = __syncthreads_or(due), fresh = __syncthreads_or(fresh), rest = __syncthreads_or(rest);
    if (!due) return;
    for (int row = threadIdx.x; row < a.rows; row += THREADS) {  // every CTA writes the same
        a.plan[row] = 0;
        a.plan[a.rows + row] = complete_blocks(a, row);
        a.plan[2 * a.rows + row] = a.num_blocks[row];
    }
    __syncthreads();
    const int pairs = a.rows * a.heads;
    if (fresh) {
        for (int i = blockIdx.x; i < pairs; i += gridDim.x) {
            const int row = i / a.heads;
            if (a.counts[row] && a.places[row] == 0) start_row(a, row, i % a.heads);
            __syncthreads();
        }
        grid_barrier(a.barrier);
    }
    if constexpr (NORM != 0) {
        constexpr int PARTS = BLOCK_TOKENS / NORM_TOKENS;
        const int units = PARTS * (SCOPE ? a.heads : 1);
        for (int i = blockIdx.x; i < a.rows * units; i += gridDim.x) {
            const int row = i / units, part = i % PARTS, head = i % units / PARTS;
            for (int block = 0; block < a.counts[row]; block++) {
                norms_of_tokens(a, row, block, part * NORM_TOKENS, head, SCOPE ? 1 : a.heads);
                __syncthreads();
            }
        }
    }
    grid_barrier(a.barrier);  // all have read num_blocks
    if (blockIdx.x == 0)
        for (int row = threadIdx.x; row < a.rows; row += THREADS) a.num_blocks[row] += a.counts[row];
    for (int i = blockIdx.x; i < 2 * pairs; i += gridDim.x) {
        const int row = i / 2 / a.heads, head = i / 2 % a.heads;
        for (int block = 0; block < a.counts[row]; block++) {
            if (i % 2 == 0)
                encode_side<true>(a, row, head, block);
            else
                encode_side<false>(a, row, head, block);
            __syncthreads();
        }
    }
    if (!rest) return;
    grid_barrier(a.barrier);
    for (int i = blockIdx.x; i < pairs; i += gridDim.x)
        if (a.counts[i / a.heads]) move_tail(a, i / a.heads, i % a.heads);
}
