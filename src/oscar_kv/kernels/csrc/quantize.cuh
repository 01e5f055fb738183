// Scales and centers as they are stored, and the codes in the order of the record.
#pragma once
#include "fit.cuh"

constexpr float HUGE_QUOTIENT = 3e38f;

// Place of number i of a run of 16 channels or tokens among the scales and centers: (tid, r >> 1, h).
__device__ __forceinline__ int metadata_order(int i) {
    return (i & ~15) | (i >> 1 & 3) << 2 | (i >> 3 & 1) << 1 | (i & 1);
}

// Exponent of the record's unit: largest < 2^(exponent + top)
__device__ __forceinline__ int unit_exponent(float largest) {
    constexpr int top = META == META_E4M3 ? 8 : 0;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 126 - top;
    return largest > 0.0f ? min(max(exponent, -100), 127) : 0;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // -127 to 127
    return exponent < -126 ? 0.5f * TINY : __uint_as_float((u32)(exponent + 127) << 23);
}

// Store scales and centers, and replace them by what `quantize` makes of what was stored, without the gain: EXACT
// center, 1 / scale and scale, or else position on the grid of 0 and of 1, both as parts of LEVELS.
template <bool KEYS>
__device__ __forceinline__ void round_grids(float4* grids, u8* record, int exponent) {
    using S = Side<KEYS>;
    float unit = power_of_two(exponent), inverse = power_of_two(-exponent);
    for (int i = threadIdx.x; i < S::GROUPS; i += THREADS) {
        float4 grid = grids[i];
        float2 stored = store_metadata<META>(
            record + S::SCALE, record + S::CENTER, metadata_order(i), grid.z * inverse, grid.x * inverse);
        float scale = stored.x * unit * S::UNGAIN, center = stored.y * unit;
        if constexpr (S::EXACT) {
            grids[i] = make_float4(center, scale >= TINY ? 1.0f / scale : 0.0f, scale, 0.0f);
        } else {
            float per_level = scale >= TINY ? fast_reciprocal(scale) * (1.0f / S::LEVELS) : 0.0f;
            *reinterpret_cast<float2*>(grids + i) = make_float2(0.5f - center * per_level, per_level * S::UNIT);
        }
    }
}

// Bits of TO_INTEGER + code
template <bool KEYS>
__device__ __forceinline__ u32 quantize(float x, float4 grid) {
    using S = Side<KEYS>;
    if constexpr (S::EXACT) {
        float difference = x - grid.x;
        float q = fminf(difference * grid.y, HUGE_QUOTIENT);  // infinity would have no remainder
        q = fmaf(fmaf(-q, grid.z, difference), grid.y, q);    // see divide
        q = fminf(fmaxf(q + S::HALF, 0.0f), (float)S::LEVELS);
        return __float_as_uint(q + __uint_as_float(TO_INTEGER));
    }
    float q = __saturatef(fmaf(x, grid.y, grid.x));  // NaN gives 0
    return __float_as_uint(fmaf(q, (float)S::LEVELS, __uint_as_float(TO_INTEGER)));
}

template <bool KEYS>
__device__ __forceinline__ float4 load_grid(const float4* grid) {
    if constexpr (Side<KEYS>::EXACT) return *grid;
    float2 pair = *reinterpret_cast<const float2*>(grid);
    return make_float4(pair.x, pair.y, 0.0f, 0.0f);
}

// What the TO_INTEGER of the codes in one word adds up to.
__host__ __device__ constexpr u32 word_offset(int width) {
    u32 sum = 0;
    for (int bit = 0; bit < 32; bit += width) sum += TO_INTEGER << bit;
    return sum;
}

// Words of one lane in one channel tile, for all 128 tokens: element (p, r, h) is row gid + 8 (r & 1), column
// 2 tid + h + 8 (r >> 1) of token tile p; rows are tokens for keys and channels for values.
template <bool KEYS>
__device__ __forceinline__ void quantize_lane(
    const float* tile, const float4* grids, int channel_tile, int slice, int lane, u8* codes) {
    using S = Side<KEYS>;
    constexpr int WIDTH = S::BITS == 3 ? 2 : S::BITS, PER_WORD = 16 / WIDTH;
    const int gid = lane >> 2, tid = lane & 3;
    const int in_tile = channel_tile * 16, channel = slice * S::SLICE + in_tile;
    const int tile_of_all = channel / 16;
    const int place = KEYS ? swizzle(gid, in_tile + 2 * tid) : swizzle(2 * tid, in_tile + gid);
    u32 word[4], high[2] = {0, 0};
#pragma unroll
    for (int p = 0; p < BLOCK_TOKENS / 16; p++) {
        if (p % PER_WORD == 0)
#pragma unroll
            for (int r = 0; r < 4; r++) word[r] = S::BITS == 3 ? 0 : 0 - word_offset(WIDTH);
#pragma unroll
        for (int r1 = 0; r1 < 2; r1++) {
            float4 grid[2];
            int column = 2 * tid + 8 * r1;
#pragma unroll
            for (int h = 0; h < 2; h++)
                grid[h] = load_grid<KEYS>(
                    grids + h + column + (KEYS ? 16 * p / S::GROUP * S::DIM + channel
                                               : channel / S::GROUP * BLOCK_TOKENS + 16 * p));
#pragma unroll
            for (int r0 = 0; r0 < 2; r0++) {
                float x[2];
                int row = gid + 8 * r0, r = 2 * r1 + r0;
                if constexpr (KEYS) {
                    const float* from = tile + (16 * p + row) * S::PITCH + combine(place, swizzle(0, 8 * r1));
                    float2 pair = *reinterpret_cast<const float2*>(from);
                    x[0] = pair.x, x[1] = pair.y;
                } else {
                    const float* from = tile + (16 * p + column) * S::PITCH;
                    x[0] = from[combine(place, swizzle(0, 8 * r0))];
                    x[1] = from[S::PITCH + combine(place, swizzle(1, 8 * r0))];
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 code = quantize<KEYS>(x[h], grid[h]);
                    if constexpr (S::BITS == 3) {
                        word[r] |= (code & 3) << (16 * h + 2 * p);
                        high[r1] |= (code >> 2 & 1) << (16 * h + 2 * p + r0);
                    } else {
                        word[r] += code << (16 * h + WIDTH * (p % PER_WORD));
                    }
                }
            }
        }
        if (p % PER_WORD == PER_WORD - 1) {
            uint4* to = reinterpret_cast<uint4*>(codes) + (p / PER_WORD * S::TILES + tile_of_all) * 32 + lane;
            *to = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    if constexpr (S::BITS == 3) {
        uint2* to = reinterpret_cast<uint2*>(codes + BLOCK_TOKENS * S::DIM / 4) + tile_of_all * 32 + lane;
        *to = make_uint2(high[0], high[1]);
    }
}
