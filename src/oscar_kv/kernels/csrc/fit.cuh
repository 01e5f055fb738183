// Scale and center of each group: one thread per group, two where it is longer than 64.
#pragma once
#include "tile.cuh"

constexpr int LSTSQ_STEPS = 3;
constexpr float TINY = 1.17549435e-38f;  // 2^-126: below it a reciprocal overflows
constexpr u32 TO_INTEGER = 0x4b000000u;  // 2^23: adding it rounds to nearest even and leaves the integer in the bits

template <int SPLIT>
__device__ __forceinline__ float add_partner(float x) {
    return SPLIT == 1 ? x : x + __shfl_xor_sync(ALL_LANES, x, 1);
}

// Sums of code and code^2 in one integer. The square of the float's bits TO_INTEGER + OFFSET + code is, modulo 2^24,
// code^2 + 2 OFFSET code and a constant.
template <bool KEYS>
struct CodeSums {
    using S = Side<KEYS>;
    static constexpr u32 OFFSET = S::BITS == 2 ? 1 << 9 : S::BITS == 3 ? 1 << 11 : 1 << 13;
    static constexpr u32 MAGIC = TO_INTEGER + OFFSET;
    static constexpr int MOST = S::PART * S::LEVELS;  // the sum of codes; MOST * LEVELS that of squares
    static_assert(S::EXACT || (MOST * S::LEVELS < 2 * OFFSET && MOST < (1 << 23) / OFFSET), "sums overlap");
    u32 sum = 0 - S::PART * MAGIC * MAGIC;

    __device__ __forceinline__ void add(u32 bits) { sum += bits * bits; }
    __device__ __forceinline__ float codes() const { return (float)((sum & 0xffffff) / (2 * OFFSET)); }
    __device__ __forceinline__ float squares() const { return (float)(sum % (2 * OFFSET)); }
};

// Sums over a group of code, code^2 and code * x; a is 1 / scale. See Side::EXACT.
template <bool KEYS>
__device__ __forceinline__ void sum_codes(
    const float (&x)[Side<KEYS>::PART], float center, float scale, float a, float& q1, float& q2, float& qx) {
    using S = Side<KEYS>;
    q1 = q2 = qx = 0.0f;
    CodeSums<KEYS> sums;
    const float per_level = a * (1.0f / S::LEVELS), offset = 0.5f - center * per_level;
#pragma unroll
    for (int i = 0; i < S::PART; i++) {
        float q;
        if constexpr (S::EXACT) {
            q = divide<true>(x[i] - center, scale, a) + S::HALF;
            q = fminf(fmaxf(q, 0.0f), (float)S::LEVELS) + __uint_as_float(TO_INTEGER);
            q -= __uint_as_float(TO_INTEGER);
            q1 += q, q2 = fmaf(q, q, q2);
        } else {  // saturation is free, and clamps to [0, 1]: NaN gives 0
            q = __saturatef(fmaf(x[i], per_level, offset));
            q = fmaf(q, (float)S::LEVELS, __uint_as_float(sums.MAGIC));
            sums.add(__float_as_uint(q));
            q -= __uint_as_float(sums.MAGIC);
        }
        qx = fmaf(q, KEYS && x[i] != x[i] ? 0.0f : x[i], qx);
    }
    if constexpr (!S::EXACT) q1 = sums.codes(), q2 = sums.squares();
}

// Least squares from the given center (x) and scale (y) on. Overwrites x by its difference from the first center.
template <bool KEYS>
__device__ __forceinline__ float2 refine(float (&x)[Side<KEYS>::PART], float count, float2 grid) {
    using S = Side<KEYS>;
    const float base = grid.x;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < S::PART; i++) {
        x[i] -= base;
        sum += KEYS && x[i] != x[i] ? 0.0f : x[i];  // NaN marks what is left out of a group of keys
    }
    sum = add_partner<S::SPLIT>(sum);
#pragma unroll 1
    for (int step = 0; step < LSTSQ_STEPS; step++) {
        float q1, q2, qx, reciprocal = 0.0f;
        if (grid.y >= TINY) reciprocal = S::EXACT ? 1.0f / grid.y : fast_reciprocal(grid.y);
        sum_codes<KEYS>(x, grid.x - base, grid.y, reciprocal, q1, q2, qx);
        q1 = add_partner<S::SPLIT>(q1), q2 = add_partner<S::SPLIT>(q2), qx = add_partner<S::SPLIT>(qx);
        float mean = q1 / count, variance = q2 - q1 * mean;
        if (variance > 0.0f) {  // else one code for the whole group: nothing to refit
            float covariance = qx - mean * sum;
            grid.y = S::EXACT ? covariance / variance : divide<true>(covariance, variance, fast_reciprocal(variance));
            grid.x = base + (sum / count - grid.y * (mean - S::HALF));
        }
    }
    return grid;
}

// Center (x) and scale (y) of a group, with the gain. NaN in x: left out for keys, taken over by the result for values.
template <bool KEYS>
__device__ __forceinline__ float2 fit(float (&x)[Side<KEYS>::PART], float count) {
    using S = Side<KEYS>;
    float low = infinity(), high = -infinity();
#pragma unroll
    for (int i = 0; i < S::PART; i++) {
        low = KEYS ? fminf(low, x[i]) : min_nan(low, x[i]);
        high = KEYS ? fmaxf(high, x[i]) : max_nan(high, x[i]);
    }
    if constexpr (S::SPLIT == 2) {
        float other = __shfl_xor_sync(ALL_LANES, low, 1);
        low = KEYS ? fminf(low, other) : min_nan(low, other);
        other = __shfl_xor_sync(ALL_LANES, high, 1);
        high = KEYS ? fmaxf(high, other) : max_nan(high, other);
    }
    if (low > high) low = high = 0.0f;  // nothing to fit
    float scale = (high - low) * S::STEP;
    float center = low + (high - low) * 0.5f;
    if constexpr (INTZERO) {
        float zero = rintf(-(center - S::HALF * scale) / (scale > 0.0f ? scale : 1.0f));
        if (scale > 0.0f) center = (S::HALF - zero) * scale;
    }
    float2 grid = make_float2(center, scale);
    if constexpr (S::LSTSQ) grid = refine<KEYS>(x, count, grid);
    return make_float2(grid.x * S::UNIT, grid.y * (S::UNIT * S::GAIN));
}

// Which group a thread works on, of the ones in the tile: `index` counts them as the metadata section does.
template <bool KEYS>
struct Group {
    int index, token, channel;  // token and channel (in the tile) of its first element

    __device__ __forceinline__ Group(int i, int slice) {
        using S = Side<KEYS>;
        if constexpr (KEYS) {  // (token group, channel)
            token = i / S::SLICE * S::GROUP;
            channel = i % S::SLICE;
            index = i / S::SLICE * S::DIM + slice * S::SLICE + channel;
        } else {  // (channel group, token)
            token = i % BLOCK_TOKENS;
            channel = i / BLOCK_TOKENS * S::GROUP;
            index = i + slice * S::SLICE / S::GROUP * BLOCK_TOKENS;
        }
    }
};

// Scale and center of all groups in the tile; returns the largest magnitude that this thread saw.
template <bool KEYS>
__device__ __forceinline__ float fit_tile(float4* grids, const float* tile, int slice, const u32* excluded) {
    using S = Side<KEYS>;
    float largest = 0.0f;
    for (int item = threadIdx.x; item < BLOCK_TOKENS * S::SLICE / S::PART; item += THREADS) {
        Group<KEYS> group(item / S::SPLIT, slice);
        int offset = item % S::SPLIT * S::PART;
        float x[S::PART], count = S::GROUP;
        if constexpr (KEYS) {
            const int first = group.token + offset, place = swizzle(0, group.channel);
#pragma unroll
            for (int i = 0; i < S::PART; i++) x[i] = tile[(first + i) * S::PITCH + combine(place, swizzle(i, 0))];
            u64 left_out = excluded[first / 32] >> first % 32;
            if (S::PART == 64) left_out |= (u64)excluded[first / 32 + 1] << 32;
            if (S::PART == 16) left_out &= 0xffff;
            int tokens = S::PART - __popcll(left_out);
            if (left_out)
#pragma unroll
                for (int i = 0; i < S::PART; i++)
                    if (left_out >> i & 1) x[i] = not_a_number();
            count = add_partner<S::SPLIT>((float)tokens);
        } else {
            const float* from = tile + group.token * S::PITCH;
            const int place = swizzle(group.token, group.channel + offset);
#pragma unroll
            for (int i = 0; i < S::PART; i += 4) {
                float4 four = *reinterpret_cast<const float4*>(from + combine(place, swizzle(0, i)));
                x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
            }
        }
        float2 grid = fit<KEYS>(x, count);
        if (is_finite(grid.x) && is_finite(grid.y)) largest = fmaxf(largest, fmaxf(fabsf(grid.x), fabsf(grid.y)));
        if (S::SPLIT == 1 || offset == 0) grids[group.index] = make_float4(grid.x, 0.0f, grid.y, 0.0f);
    }
    return largest;
}
