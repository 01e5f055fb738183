// What belongs to the first block of a sequence: its sinks and its equalization vector.
#pragma once
#include "transform.cuh"

constexpr int KEY_PIECES = KD * ITEM / 16, VALUE_PIECES = VD * ITEM / 16;  // 16 bytes each, of a token
constexpr int PIECES = KEY_PIECES + VALUE_PIECES;
constexpr float MIN_RANGE = 1.0f / 1024;  // smallest relative range that equalization amplifies
constexpr float MIN_QUERY = 1.0f / 32;    // and smallest relative size of queries that it makes up for

__device__ __forceinline__ uint4 load_piece(const u8* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ __forceinline__ void store_piece(u8* to, uint4 piece) { *reinterpret_cast<uint4*>(to) = piece; }
__device__ __forceinline__ void copy_piece(u8* to, const u8* from) { store_piece(to, load_piece(from)); }

__device__ __forceinline__ float number(const u8* from, int i) {
    if constexpr (DTYPE == DTYPE_F32) return reinterpret_cast<const float*>(from)[i];
    u16 bits = reinterpret_cast<const u16*>(from)[i];
    return DTYPE == DTYPE_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// For one head of a row whose first block is about to be packed. The vector: mean over groups of (max - min) of each
// channel, by its mean over channels, to the power of `exponent`; without sinks and tokens that are not finite.
__device__ __forceinline__ void start_row(const Args& a, Spot spot, int head) {
    __shared__ u32 excluded[BLOCK_TOKENS / 32];
    __shared__ float ranges[KD], total;
    __shared__ double mean_rms;
    const int thread = threadIdx.x, threads = blockDim.x;
    const i64 index = (i64)spot.row * a.heads + head;
    const u8* keys = a.keys + spot.row * a.key_row + head * a.key_head + (i64)spot.start * a.key_token;
    const u8* values = a.values + spot.row * a.value_row + head * a.value_head + (i64)spot.start * a.value_token;
    for (int i = thread; i < a.num_sinks * PIECES; i += threads) {
        const int token = i / PIECES, piece = i % PIECES, other = piece - KEY_PIECES;
        const i64 slot = index * a.num_sinks + token;
        if (piece < KEY_PIECES)
            copy_piece(a.sink_keys + (slot * KEY_PIECES + piece) * 16, keys + (i64)token * a.key_token + piece * 16);
        else
            copy_piece(
                a.sink_values + (slot * VALUE_PIECES + other) * 16, values + (i64)token * a.value_token + other * 16);
    }
    if constexpr (!EQUAL) return;

    if (thread < BLOCK_TOKENS / 32) {
        const int sinks = a.num_sinks - 32 * thread;
        excluded[thread] = sinks <= 0 ? 0 : sinks >= 32 ? ALL_LANES : (1u << sinks) - 1;
    }
    __syncthreads();
    for (int i = thread; i < BLOCK_TOKENS * KD; i += threads) {
        const int token = i / KD;
        const float x = number(keys + (i64)token * a.key_token, i % KD);
        if (!is_finite(x)) atomicOr(&excluded[token / 32], 1u << token % 32);
    }
    __syncthreads();
    for (int c = thread; c < KD; c += threads) {
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
    for (int c = thread; c < KD; c += threads) {
        float relative = ranges[c] / total;
        if (!is_finite(relative)) relative = 1.0f;  // all channels constant, or overflow
        relative = fmaxf(relative, MIN_RANGE);
        a.equalizer[index * KD + c] = a.exponent == 0.5f ? sqrtf(relative) : powf(relative, a.exponent);
    }
    if (a.query_power == nullptr) return;

    // by root mean squares of queries, relative to their mean over channels, to the power of -query_exponent
    const double* power = a.query_power + index * KD;
    __syncthreads();
    if (thread == 0) {
        double sum = 0.0;
        for (int c = 0; c < KD; c++) sum += sqrt(power[c]);
        mean_rms = sum / KD;
    }
    __syncthreads();
    for (int c = thread; c < KD; c += threads) {
        float relative = (float)(sqrt(power[c]) / mean_rms);
        if (!is_finite(relative)) relative = 1.0f;  // no queries
        a.equalizer[index * KD + c] /= powf(fmaxf(relative, MIN_QUERY), a.query_exponent);
    }
}
