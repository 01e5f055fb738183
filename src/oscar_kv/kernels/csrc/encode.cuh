// Blocks of 128 keys and values -> records: the GPU form of codec.encode, as functions for all threads of a CTA.
//
// norms_of_tokens  reads keys and writes the norms of their tokens.
// encode_side      packs one block of one KV head and side (keys or values):
//                  1. transform   global -> registers: equalize, rotate by butterflies, divide by the norm
//                                 -> tile, float32 (128, SLICE) in shared memory
//                  2. fit         one thread per group (two where it is longer than 64): scale and center
//                  3. round       scale and center to their storage format, relative to the record's unit
//                  4. quantize    each thread builds whole words of the record: 16 channels or rows by 128 tokens,
//                                 read from the tile in fragment order, stored as 16 coalesced bytes per lane
//
// Both use shared memory: a CTA that calls them again waits for all its threads first (__syncthreads).
//
// All arithmetic is that of the reference, operation by operation (compile with -fmad=false), so that the bytes are
// equal where no sum comes in. Sums (of norms, of least squares) are taken in another order; what follows them may be
// off by a rounding error, which tips a code in a million. See Side::EXACT.
//
// Defines. Of each side X = K, V: XD head dimension, XBITS, XGROUP, ROTX, XFIT (0 min/max, 1 least squares),
// XSTEP (shrink / levels as float32), XSLICE (channels in shared memory at a time). DTYPE, META: see common.cuh.
// NORM 0 none, 1 l2, 2 max, 3 mean_abs. SCOPE 0 one norm over all heads, 1 one per head. INTZERO, EQUAL.
// THREADS, CTAS (per multiprocessor), SHARED (bytes). RECORD, KEY_SCALE, KEY_CENTER, UNITS, VALUE_CODES, VALUE_SCALE,
// VALUE_CENTER: bytes of a record and of what lies before each section.
#pragma once
#include "transform.cuh"

constexpr int NORM_TOKENS = 32;  // tokens of a token_norms CTA
constexpr int LSTSQ_STEPS = 3;
constexpr float TINY = 1.17549435e-38f;  // 2^-126: below it a reciprocal overflows
constexpr float HUGE_QUOTIENT = 3e38f;
constexpr u32 TO_INTEGER = 0x4b000000u;  // 2^23: adding it rounds to nearest even and leaves the integer in the bits

// Where channel c of a token lies in its row of the tile: lanes that store 8 channels each meet no bank twice.
__device__ __forceinline__ int swizzle(int c) { return c ^ (c >> 3 & 4); }

// Place of number i of a run of 16 channels or tokens among the scales and centers: (tid, r >> 1, h).
__device__ __forceinline__ int metadata_order(int i) {
    return (i & ~15) | (i >> 1 & 3) << 2 | (i >> 3 & 1) << 1 | (i & 1);
}

// --- 1. transform ---------------------------------------------------------------------------------------------------

// Equalizer of a part, as numbers and reciprocals; `from` is (KD) pairs in shared memory.
__device__ __forceinline__ void load_equalizer(float (&e)[16], float (&r)[16], const float2* from, int part) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        int channel = first_channel<true>(part) + (i & 7) + (i < 8 ? 0 : Side<true>::HADAMARD / 2);
        float4 pair = *reinterpret_cast<const float4*>(from + channel);
        e[i] = pair.x, r[i] = pair.y, e[i + 1] = pair.z, r[i + 1] = pair.w;
    }
}

// Fill the tile with channels SLICE * slice on; `block` is the head's first token of the block, `norms` (128) lies in
// shared memory. Without norms, tokens that are not finite are noted in `broken`.
template <bool KEYS>
__device__ __forceinline__ void transform(
    float* tile, const u8* block, int token_stride, int slice, const float2* equalizer, const float* norms,
    u32* broken) {
    using S = Side<KEYS>;
    constexpr int ITEMS = BLOCK_TOKENS * S::PARTS;
    constexpr bool EQUALIZE = KEYS && EQUAL, STAY = THREADS % S::PARTS == 0;  // STAY: a thread stays in its channels
    int t = threadIdx.x / S::PARTS, part = threadIdx.x % S::PARTS;
    float e[16], r[16];
    if constexpr (EQUALIZE && STAY) load_equalizer(e, r, equalizer, part);
#pragma unroll 2
    for (int first = 0; first < ITEMS; first += THREADS) {
        if constexpr (STAY) {
            t = threadIdx.x / S::PARTS + first / S::PARTS;
        } else {
            t = (first + threadIdx.x) / S::PARTS, part = (first + threadIdx.x) % S::PARTS;
        }
        if (ITEMS % THREADS && first + threadIdx.x >= ITEMS) break;  // whole warps
        float x[16];
        load_part<KEYS>(x, block + (i64)t * token_stride, part);
        if constexpr (EQUALIZE) {
            if constexpr (!STAY) load_equalizer(e, r, equalizer, part);
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = divide(x[i], e[i], r[i]);
        }
        if constexpr (S::ROTATE) rotate<KEYS>(x, part);
        if constexpr (KEYS && NORM != 0) divide_by_norm(x, norms[t]);
        if constexpr (KEYS && NORM == 0) {
            float zero = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i++) zero = fmaf(x[i], 0.0f, zero);
            if (zero != 0.0f) atomicOr(&broken[t / 32], 1u << t % 32);  // NaN: one of them is not finite
        }
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            int channel = first_channel<KEYS>(part) + (i & 7) + (i < 8 ? 0 : S::HADAMARD / 2) - slice * S::SLICE;
            if (S::SLICES > 1 && (unsigned)channel >= (unsigned)S::SLICE) continue;
            float4* to = reinterpret_cast<float4*>(tile + t * S::PITCH + swizzle(channel));
            *to = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        }
    }
    __syncthreads();
    if constexpr (!KEYS || NORM == 0) {  // values of sinks, and keys that are not finite and have no norm to say so: 0
        if (broken[0] | broken[1] | broken[2] | broken[3]) {
            for (int i = threadIdx.x; i < BLOCK_TOKENS * S::PITCH; i += THREADS) {
                int t = i / S::PITCH;
                if (broken[t / 32] >> t % 32 & 1) tile[i] = 0.0f;
            }
            __syncthreads();
        }
    }
}

// --- 2. fit ---------------------------------------------------------------------------------------------------------

template <int SPLIT>
__device__ __forceinline__ float add_partner(float x) {
    return SPLIT == 1 ? x : x + __shfl_xor_sync(ALL_LANES, x, 1);
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
        float reciprocal = grid.y >= TINY ? 1.0f / grid.y : 0.0f;
        float offset = S::HALF - (grid.x - base) * reciprocal;
        u32 codes = 0 - S::PART * TO_INTEGER;  // sums of code, code^2 and code * x
        float q2 = 0.0f, qx = 0.0f;
#pragma unroll
        for (int i = 0; i < S::PART; i++) {
            float q;
            if constexpr (!S::EXACT) {  // saturation is free, and clamps to [0, 1]: NaN gives 0
                q = __saturatef(fmaf(x[i], reciprocal * (1.0f / S::LEVELS), offset * (1.0f / S::LEVELS)));
                q = fmaf(q, (float)S::LEVELS, __uint_as_float(TO_INTEGER));
            } else {
                q = divide(x[i] - (grid.x - base), grid.y, reciprocal) + S::HALF;
                q = fminf(fmaxf(q, 0.0f), (float)S::LEVELS) + __uint_as_float(TO_INTEGER);
            }
            codes += __float_as_uint(q);  // two to an instruction
            q -= __uint_as_float(TO_INTEGER);
            q2 = fmaf(q, q, q2);
            qx = fmaf(q, KEYS && x[i] != x[i] ? 0.0f : x[i], qx);
        }
        float q1 = add_partner<S::SPLIT>((float)codes);
        q2 = add_partner<S::SPLIT>(q2), qx = add_partner<S::SPLIT>(qx);
        float mean = q1 / count, variance = q2 - q1 * mean;
        if (variance > 0.0f) {  // else one code for the whole group: nothing to refit
            grid.y = (qx - mean * sum) / variance;
            grid.x = base + (sum / count - grid.y * (mean - S::HALF));
        }
    }
    return grid;
}

// Center (x) and scale (y) of a group. NaN in x: left out for keys, taken over by the result for values.
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
    return S::LSTSQ ? refine<KEYS>(x, count, grid) : grid;
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
            const float* from = tile + (group.token + offset) * S::PITCH + swizzle(group.channel);
#pragma unroll
            for (int i = 0; i < S::PART; i++) x[i] = from[i * S::PITCH];
            int first = group.token + offset;
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
#pragma unroll
            for (int i = 0; i < S::PART; i += 4) {
                float4 four = *reinterpret_cast<const float4*>(from + swizzle(group.channel + offset + i));
                x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
            }
        }
        float2 grid = fit<KEYS>(x, count);
        if (is_finite(grid.x) && is_finite(grid.y)) largest = fmaxf(largest, fmaxf(fabsf(grid.x), fabsf(grid.y)));
        if (S::SPLIT == 1 || offset == 0) grids[group.index] = make_float4(grid.x, 0.0f, grid.y, 0.0f);
    }
    return largest;
}

// --- 3. round -------------------------------------------------------------------------------------------------------

// Exponent of the record's unit: largest < 2^(exponent + top)
__device__ __forceinline__ int unit_exponent(float largest) {
    constexpr int top = META == META_E4M3 ? 8 : 0;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 126 - top;
    return largest > 0.0f ? min(max(exponent, -100), 127) : 0;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // -127 to 127
    return exponent < -126 ? 0.5f * TINY : __uint_as_float((u32)(exponent + 127) << 23);
}

// Store scales and centers, and replace them by what was stored, with the reciprocals of the scales.
template <bool KEYS>
__device__ __forceinline__ void round_grids(float4* grids, u8* record, int exponent) {
    using S = Side<KEYS>;
    float unit = power_of_two(exponent), inverse = power_of_two(-exponent);
    for (int i = threadIdx.x; i < S::GROUPS; i += THREADS) {
        float4 grid = grids[i];
        float2 stored = store_metadata<META>(
            record + S::SCALE, record + S::CENTER, metadata_order(i), grid.z * inverse, grid.x * inverse);
        grid.z = stored.x * unit;
        grid.x = stored.y * unit;
        grid.y = grid.z >= TINY ? 1.0f / (S::EXACT ? grid.z : grid.z * S::LEVELS) : 0.0f;
        grids[i] = grid;
    }
}

// --- 4. quantize ----------------------------------------------------------------------------------------------------

// Bits of TO_INTEGER + code
template <bool KEYS>
__device__ __forceinline__ u32 quantize(float x, float4 grid) {
    using S = Side<KEYS>;
    float difference = x - grid.x;
    if constexpr (!S::EXACT) {  // grid.y is 1 / (scale * LEVELS)
        float q = __saturatef(fmaf(difference, grid.y, 0.5f));  // NaN gives 0
        return __float_as_uint(fmaf(q, (float)S::LEVELS, __uint_as_float(TO_INTEGER)));
    }
    float q = difference * grid.y;
    q = fminf(q, HUGE_QUOTIENT);  // infinity would have no remainder
    q = fmaf(fmaf(-q, grid.z, difference), grid.y, q);  // see divide
    q = fminf(fmaxf(q + S::HALF, 0.0f), (float)S::LEVELS);
    return __float_as_uint(q + __uint_as_float(TO_INTEGER));
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
                grid[h] = KEYS ? grids[16 * p / S::GROUP * S::DIM + channel + column + h]
                               : grids[channel / S::GROUP * BLOCK_TOKENS + 16 * p + column + h];
#pragma unroll
            for (int r0 = 0; r0 < 2; r0++) {
                float x[2];
                int row = gid + 8 * r0, r = 2 * r1 + r0;
                if constexpr (KEYS) {
                    const float* from = tile + (16 * p + row) * S::PITCH + swizzle(in_tile + column);
                    float2 pair = *reinterpret_cast<const float2*>(from);
                    x[0] = pair.x, x[1] = pair.y;
                } else {
                    const float* from = tile + (16 * p + column) * S::PITCH + swizzle(in_tile + row);
                    x[0] = from[0], x[1] = from[S::PITCH];
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

// --- whole blocks ----------------------------------------------------------------------------------------------------

template <bool KEYS>
__device__ __forceinline__ void encode_side(const Args& a, int row, int head, int block) {
    using S = Side<KEYS>;
    extern __shared__ float4 shared[];
    __shared__ u32 excluded[4], broken[4], largest;  // tokens out of the statistics, tokens that are not finite
    __shared__ float norms[BLOCK_TOKENS];
    float4* grids = shared;  // (GROUPS): center, 1 / scale, scale
    float* tile = reinterpret_cast<float*>(shared + S::GROUPS);  // (128, PITCH)
    float2* equalizer = reinterpret_cast<float2*>(tile + BLOCK_TOKENS * S::PITCH);  // (KD): e, 1 / e

    const int place = a.places[row] + block, token_stride = KEYS ? a.key_token : a.value_token;
    const u8* numbers = KEYS ? a.keys : a.values;
    numbers += row * (KEYS ? a.key_row : a.value_row) + head * (KEYS ? a.key_head : a.value_head);
    numbers += (i64)(a.starts[row] + BLOCK_TOKENS * block) * token_stride;
    u8* record = a.records + row * a.record_row + place * a.record_block + (i64)head * RECORD;
    u32* units = reinterpret_cast<u32*>(record + UNITS);
    int exponent = 0;

    if constexpr (S::BITS == 16) {  // the numbers as they are
        constexpr int PIECES = S::DIM * ITEM / 16;
        for (int i = threadIdx.x; i < BLOCK_TOKENS * PIECES; i += THREADS) {
            const u8* from = numbers + (i64)(i / PIECES) * token_stride + i % PIECES * 16;
            reinterpret_cast<uint4*>(record + S::CODES)[i] = *reinterpret_cast<const uint4*>(from);
        }
    } else {
        const int thread = threadIdx.x;
        constexpr int LINES = (S::DIM * ITEM + 127) / 128;
        for (int i = thread; i < BLOCK_TOKENS * LINES; i += THREADS)
            prefetch(numbers + (i64)(i / LINES) * token_stride + i % LINES * 128);
        if (thread < BLOCK_TOKENS) {
            bool out = place == 0 && thread < a.num_sinks;
            if constexpr (KEYS && NORM != 0) {
                const u16* from = a.norms + row * a.norm_row + place * a.norm_block + (SCOPE ? head * BLOCK_TOKENS : 0);
                norms[thread] = bf16_to_float(from[norm_order(thread)]);
                out |= !is_finite(norms[thread]);
            }
            u32 mask = __ballot_sync(ALL_LANES, out);
            if (thread % 32 == 0) excluded[thread / 32] = mask, broken[thread / 32] = KEYS ? 0 : mask;
            if (thread == 0) largest = 0;
        }
        if constexpr (KEYS && EQUAL)
            for (int c = thread; c < KD; c += THREADS) {
                float e = a.equalizer[((i64)row * a.heads + head) * KD + c];
                equalizer[c] = make_float2(e, 1.0f / e);
            }
        __syncthreads();

        float own = 0.0f;
        for (int slice = 0; slice < S::SLICES; slice++) {
            if (slice) __syncthreads();  // the tile has been read
            transform<KEYS>(tile, numbers, token_stride, slice, equalizer, norms, broken);
            if (KEYS && NORM == 0 && slice == 0) {
                if (thread < 4) excluded[thread] |= broken[thread];
                __syncthreads();
            }
            own = fmaxf(own, fit_tile<KEYS>(grids, tile, slice, excluded));
        }
        u32 top = warp_max(__float_as_uint(own));  // positive floats are ordered as their bits
        if (thread % 32 == 0) atomicMax(&largest, top);
        __syncthreads();
        exponent = unit_exponent(__uint_as_float(largest));
        round_grids<KEYS>(grids, record, exponent);
        __syncthreads();
        for (int slice = 0; slice < S::SLICES; slice++) {
            if (S::SLICES > 1) {  // the tile held the last slice
                if (slice) __syncthreads();
                transform<KEYS>(tile, numbers, token_stride, slice, equalizer, norms, broken);
            }
            for (int i = thread; i < S::SLICE / 16 * 32; i += THREADS)
                quantize_lane<KEYS>(tile, grids, i / 32, slice, i % 32, record + S::CODES);
        }
    }
    if (threadIdx.x == 0) {
        units[KEYS ? 0 : 1] = __float_as_uint(power_of_two(exponent));
        if (!KEYS) units[2] = units[3] = 0;
    }
}

// Norms of the NORM_TOKENS tokens of a block from first_token on, over `heads` heads from first_head on.
__device__ __forceinline__ void norms_of_tokens(
    const Args& a, int row, int block, int first_token, int first_head, int heads) {
#if NORM != 0
    constexpr int PARTS = KD / 16;
    __shared__ float partial[NORM_TOKENS * PARTS];
    const u8* keys = a.keys + row * a.key_row + (i64)(a.starts[row] + BLOCK_TOKENS * block + first_token) * a.key_token;
    for (int item = threadIdx.x; item < NORM_TOKENS * PARTS; item += blockDim.x) {
        const int part = item % PARTS;
        float sum = 0.0f;  // or maximum
#pragma unroll 4
        for (int head = first_head; head < first_head + heads; head++) {
            float x[16];
            load_part<true>(x, keys + head * a.key_head + (i64)(item / PARTS) * a.key_token, part);
            if constexpr (EQUAL) {
                const float* e = a.equalizer + ((i64)row * a.heads + head) * KD + first_channel<true>(part);
                float divisor[16];
                load_elements<DTYPE_F32>(divisor, reinterpret_cast<const u8*>(e));
                load_elements<DTYPE_F32>(divisor + 8, reinterpret_cast<const u8*>(e + Side<true>::HADAMARD / 2));
#pragma unroll
                for (int i = 0; i < 16; i++)  // the sum of squares rounds more coarsely than a fast division
                    x[i] = NORM == 1 ? __fdividef(x[i], divisor[i]) : x[i] / divisor[i];
            }
            if constexpr (NORM != 1 && ROTK) rotate<true>(x, part);  // which keeps the l2 norm
#pragma unroll
            for (int i = 0; i < 16; i++)
                sum = NORM == 1 ? fmaf(x[i], x[i], sum) : NORM == 2 ? max_nan(sum, fabsf(x[i])) : sum + fabsf(x[i]);
        }
        partial[item] = sum;
    }
    __syncthreads();
    if (threadIdx.x < NORM_TOKENS) {
        float sum = 0.0f;
        for (int i = 0; i < PARTS; i++) {
            float x = partial[threadIdx.x * PARTS + i];
            sum = NORM == 2 ? max_nan(sum, x) : sum + x;
        }
        float norm = NORM == 2 ? sum : sum / (heads * KD);
        u16 stored = float_to_bf16(NORM == 1 ? sqrtf(norm) : norm);
        if (!is_finite(bf16_to_float(stored))) stored = 0x7fc0;
        u16* norms = a.norms + row * a.norm_row + (a.places[row] + block) * a.norm_block + first_head * BLOCK_TOKENS;
        norms[norm_order(first_token + threadIdx.x)] = stored;
    }
#endif
}
