// Blocks of 128 keys and values -> records: the GPU form of codec.encode, as functions for all threads of a CTA.
//
// norms_of_tokens  reads keys and writes the norms of their tokens.
// encode_side      packs one block of one KV head and side (keys or values):
//                  1. fill the tile  global -> registers: equalize, rotate, divide by the norm -> float32 (128, SLICE)
//                                    in shared memory (tile.cuh; tensor_rotate.cuh or butterflies in transform.cuh)
//                  2. fit            one thread per group: scale and center (fit.cuh)
//                  3. round          scale and center as they are stored, relative to the record's unit (quantize.cuh)
//                  4. quantize       each thread builds whole words of the record, read from the tile in fragment
//                                    order and stored as 16 coalesced bytes per lane
//
// Both use shared memory: a CTA that calls them again waits for all its threads first (__syncthreads).
//
// Where no sum comes in the arithmetic is that of the reference, operation by operation (compile with -fmad=false),
// so that the bytes are equal. Else sums (of rotations, of norms, of least squares) are taken in another order and
// products with reciprocals stand for divisions: what follows may be off by a rounding error, which tips a code in a
// million. See Side::EXACT.
//
// Defines. Of each side X = K, V: XD head dimension, XBITS, XGROUP, ROTX, XFIT (0 min/max, 1 least squares),
// XSTEP (shrink / levels as float32), XSLICE (channels in shared memory at a time). DTYPE, META: see common.cuh.
// NORM 0 none, 1 l2, 2 max, 3 mean_abs. SCOPE 0 one norm over all heads, 1 one per head. INTZERO, EQUAL.
// THREADS, CTAS (per multiprocessor), SHARED (bytes). RECORD, KEY_SCALE, KEY_CENTER, UNITS, VALUE_CODES, VALUE_SCALE,
// VALUE_CENTER: bytes of a record and of what lies before each section.
#pragma once
#include "launch.cuh"
#include "quantize.cuh"

// Equalizer of one head, (KD): for tensor cores the terms of its reciprocals, or else numbers and reciprocals.
__device__ __forceinline__ void prepare_equalizer(float2* to, const float* equalizer) {
    if constexpr (Side<true>::TENSOR) {
        uint4* upper = reinterpret_cast<uint4*>(to);
        uint2* lower = reinterpret_cast<uint2*>(upper + KD / 4);
        for (int c = threadIdx.x; c < KD; c += THREADS) split_equalizer(equalizer[c], c, upper, lower);
    } else {
        for (int c = threadIdx.x; c < KD; c += THREADS) to[c] = make_float2(equalizer[c], 1.0f / equalizer[c]);
    }
}

// Whole warps wait until norms of a row are there, when keys are on their way: each source has its own way.
__device__ __forceinline__ void wait_for_norms(const Args& a, int row);

// Pack keys or values of one block and head.
template <bool KEYS>
__device__ __forceinline__ void encode_side(const Args& a, Spot spot, int head) {
    using S = Side<KEYS>;
    // values of sinks, and keys that are not finite and have no norm to say so
    constexpr bool ZERO = KEYS ? NORM == 0 : !S::TENSOR;
    __builtin_assume(threadIdx.x < THREADS);
    extern __shared__ float4 dynamic[];
    __shared__ Block shared;
    float4* grids = dynamic;                                                        // (GROUPS)
    float* tile = reinterpret_cast<float*>(dynamic + S::GROUPS);                    // (128, PITCH)
    float2* equalizer = reinterpret_cast<float2*>(tile + BLOCK_TOKENS * S::PITCH);  // (KD)

    const int thread = threadIdx.x, row = spot.row, place = spot.place, token_stride = KEYS ? a.key_token : a.value_token;
    const u8* numbers = KEYS ? a.keys : a.values;
    numbers += row * (KEYS ? a.key_row : a.value_row) + head * (KEYS ? a.key_head : a.value_head);
    numbers += (i64)spot.start * token_stride;
    u8* record = a.records + row * a.record_row + place * a.record_block + (i64)head * RECORD;
    u32* units = reinterpret_cast<u32*>(record + UNITS);
    int exponent = 0;

    if constexpr (S::BITS == 16) {  // the numbers as they are
        constexpr int PIECES = S::DIM * ITEM / 16;
        for (int i = thread; i < BLOCK_TOKENS * PIECES; i += THREADS) {
            const u8* from = numbers + (i64)(i / PIECES) * token_stride + i % PIECES * 16;
            reinterpret_cast<uint4*>(record + S::CODES)[i] = *reinterpret_cast<const uint4*>(from);
        }
    } else {
        Pairs<KEYS> pairs;
        if constexpr (S::TENSOR) {
            Items<KEYS>::load(pairs, numbers, token_stride, thread / 32);
        } else {
            constexpr int LINES = (S::DIM * ITEM + 127) / 128;
            for (int i = thread; i < BLOCK_TOKENS * LINES; i += THREADS)
                prefetch(numbers + (i64)(i / LINES) * token_stride + i % LINES * 128);
        }
        if (thread < BLOCK_TOKENS) {
            constexpr float FACTOR = inverse_root(S::HADAMARD) / (EQUAL ? TERMS_UNIT : 1.0f);
            bool out = place == 0 && thread < a.num_sinks;
            float norm = 1.0f;
            if constexpr (KEYS && NORM != 0) {
                wait_for_norms(a, row);
                const u16* from = a.norms + row * a.norm_row + place * a.norm_block + (SCOPE ? head * BLOCK_TOKENS : 0);
                norm = bf16_to_float(from[norm_order(thread)]);
                out |= !is_finite(norm);
            }
            if constexpr (S::TENSOR)  // of a subnormal norm there is no reciprocal
                norm = norm > 0.0f && is_finite(norm) ? fminf(FACTOR / norm, 3e38f) : 0.0f;
            shared.norms[thread] = norm;
            u32 mask = __ballot_sync(ALL_LANES, out);
            if (thread % 32 == 0) shared.excluded[thread / 32] = mask, shared.broken[thread / 32] = KEYS ? 0 : mask;
            if (thread == 0) shared.largest = 0;
        }
        if constexpr (KEYS && EQUAL) prepare_equalizer(equalizer, a.equalizer + ((i64)row * a.heads + head) * KD);
        __syncthreads();

        float own = 0.0f;
        for (int slice = 0; slice < S::SLICES; slice++) {
            if (slice) __syncthreads();  // the tile has been read
            if constexpr (S::TENSOR)
                fill_by_tensor_cores<KEYS>(tile, numbers, token_stride, pairs, equalizer, shared);
            else
                fill_by_butterflies<KEYS>(tile, numbers, token_stride, slice, equalizer, shared);
            __syncthreads();
            if constexpr (ZERO) zero_broken<KEYS>(tile, shared);
            if (KEYS && NORM == 0 && slice == 0) {
                if (thread < 4) shared.excluded[thread] |= shared.broken[thread];
                __syncthreads();
            }
            own = fmaxf(own, fit_tile<KEYS>(grids, tile, slice, shared.excluded));
        }
        u32 top = warp_max(__float_as_uint(own));  // positive floats are ordered as their bits
        if (thread % 32 == 0) atomicMax(&shared.largest, top);
        __syncthreads();
        exponent = unit_exponent(__uint_as_float(shared.largest));
        round_grids<KEYS>(grids, record, exponent);
        __syncthreads();
        for (int slice = 0; slice < S::SLICES; slice++) {
            if (S::SLICES > 1) {  // the tile held the last slice
                if (slice) __syncthreads();
                fill_by_butterflies<KEYS>(tile, numbers, token_stride, slice, equalizer, shared);
                __syncthreads();
                if constexpr (ZERO) zero_broken<KEYS>(tile, shared);
            }
            for (int i = thread; i < S::SLICE / 16 * 32; i += THREADS)
                quantize_lane<KEYS>(tile, grids, i / 32, slice, i % 32, record + S::CODES);
        }
    }
    if (thread == 0) {
        units[KEYS ? 0 : 1] = __float_as_uint(power_of_two(exponent));
        if (!KEYS) units[2] = units[3] = 0;
    }
}

// Norms of TOKENS tokens of a block from first_token on, over `heads` heads from first_head on. SHARE threads share the
// heads of a token, in whole warps; the order of the sum does not depend on TOKENS.
template <int TOKENS>
__device__ __forceinline__ void norms_of_tokens(
    const Args& a, Spot spot, int first_token, int first_head, int heads) {
#if NORM != 0
    constexpr int PARTS = KD / 16, SHARE = SCOPE ? 1 : 4;
    __shared__ float partial[SHARE * TOKENS * PARTS];
    const u8* keys = a.keys + spot.row * a.key_row + (i64)(spot.start + first_token) * a.key_token;
    for (int item = threadIdx.x; item < SHARE * TOKENS * PARTS; item += blockDim.x) {
        const int part = item % PARTS, token = item / PARTS % TOKENS, share = item / PARTS / TOKENS;
        float sum = 0.0f;  // or maximum
#pragma unroll 2
        for (int i = share; i - share < heads; i += SHARE) {  // as often for all lanes
            const int head = first_head + min(i, heads - 1);
            float x[16];
            load_part<true>(x, keys + head * a.key_head + (i64)token * a.key_token, part);
            if constexpr (EQUAL) {
                const float* e = a.equalizer + ((i64)spot.row * a.heads + head) * KD + first_channel<true>(part);
                float divisor[16];
                load_elements<DTYPE_F32>(divisor, reinterpret_cast<const u8*>(e));
                load_elements<DTYPE_F32>(divisor + 8, reinterpret_cast<const u8*>(e + Side<true>::HADAMARD / 2));
#pragma unroll
                for (int c = 0; c < 16; c++)  // a sum of squares rounds more coarsely
                    x[c] = NORM == 1 ? x[c] * coarse_reciprocal(divisor[c]) : x[c] / divisor[c];
            }
            if constexpr (NORM != 1 && ROTK) rotate<true>(x, part);  // which keeps the l2 norm
#pragma unroll
            for (int c = 0; c < 16; c++)
                if (i < heads)
                    sum = NORM == 1 ? fmaf(x[c], x[c], sum) : NORM == 2 ? max_nan(sum, fabsf(x[c])) : sum + fabsf(x[c]);
        }
        partial[item] = sum;
    }
    __syncthreads();
    if (threadIdx.x < TOKENS) {
        float sum = 0.0f;
        for (int i = 0; i < SHARE * PARTS; i++) {
            float x = partial[(i / PARTS * TOKENS + threadIdx.x) * PARTS + i % PARTS];
            sum = NORM == 2 ? max_nan(sum, x) : sum + x;
        }
        float norm = NORM == 2 ? sum : sum / (heads * KD);
        u16 stored = float_to_bf16(NORM == 1 ? sqrtf(norm) : norm);
        if (!is_finite(bf16_to_float(stored))) stored = 0x7fc0;
        u16* norms = a.norms + spot.row * a.norm_row + spot.place * a.norm_block + first_head * BLOCK_TOKENS;
        norms[norm_order(first_token + threadIdx.x)] = stored;
    }
#endif
}
