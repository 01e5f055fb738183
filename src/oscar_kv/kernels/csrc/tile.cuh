// A block of one side on its way from global to shared memory: equalized, rotated, divided by the norms.
#pragma once
#include "tensor_rotate.cuh"

// Where channel c of token t lies in its row of the tile. Lanes that store 8 channels each meet no bank twice, be they
// of one token or, with the pitch of the keys, of two.
template <bool KEYS>
__device__ __forceinline__ int swizzle(int t, int c) {
    return c ^ (c >> 3 & 4) ^ (KEYS ? (t & 1) << 2 : 0);
}

// Store 4 channels of token t, unless the tile holds others.
template <bool KEYS>
__device__ __forceinline__ void store_four(float* tile, int t, int channel, int slice, const float* x) {
    using S = Side<KEYS>;
    channel -= slice * S::SLICE;
    if (S::SLICES > 1 && (unsigned)channel >= (unsigned)S::SLICE) return;
    *reinterpret_cast<float4*>(tile + t * S::PITCH + swizzle<KEYS>(t, channel)) = make_float4(x[0], x[1], x[2], x[3]);
}

// What lies in shared memory for all threads: of the keys or values of one block
struct Block {
    u32 excluded[4], broken[4], largest;  // tokens out of the statistics, tokens that count as 0
    float norms[BLOCK_TOKENS];
    __device__ __forceinline__ bool is_broken(int t) const { return broken[t / 32] >> t % 32 & 1; }
};

// Note a token that is not finite, where it has no norm to say so.
template <int N>
__device__ __forceinline__ void note_broken(Block& shared, int t, const float (&x)[N]) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) zero = fmaf(x[i], 0.0f, zero);
    if (zero != 0.0f) atomicOr(&shared.broken[t / 32], 1u << t % 32);  // NaN: one of them is not finite
}

// Rotation by tensor cores: a warp takes 16 tokens of one Hadamard block at a time.
template <bool KEYS>
__device__ __forceinline__ void fill_by_tensor_cores(
    float* tile, const u8* numbers, int token_stride, int slice, const float2* equalizer, Block& shared) {
    using S = Side<KEYS>;
    using Q = Quad<KEYS>;
    constexpr int BLOCKS = S::DIM / S::HADAMARD;
    constexpr float FACTOR = inverse_root(S::HADAMARD) / (KEYS && EQUAL ? TERMS_UNIT : 1.0f);
    const uint4* upper = reinterpret_cast<const uint4*>(equalizer);
    const uint2* lower = reinterpret_cast<const uint2*>(upper + S::DIM / 4);
    const int tid = threadIdx.x % 4;
    for (int item = threadIdx.x / 32; item < BLOCK_TOKENS / 16 * BLOCKS; item += THREADS / 32) {
        const int first = item % BLOCKS * S::HADAMARD, t = item / BLOCKS * 16 + threadIdx.x % 32 / 4;
        float x[2][Q::NUMBERS];
        tensor_rotate<KEYS>(
            x, numbers + (i64)t * token_stride + first * ITEM, (i64)token_stride * 8, upper + first / 4, lower + first / 4);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const int token = t + 8 * row;
            if constexpr (KEYS && NORM != 0) {
                divide_by_norm<false>(x[row], shared.norms[token], FACTOR);
            } else if constexpr (KEYS) {
#pragma unroll
                for (int i = 0; i < Q::NUMBERS; i++) x[row][i] *= FACTOR;
                note_broken(shared, token, x[row]);
            } else if (shared.is_broken(token)) {  // the factor comes with the scales
#pragma unroll
                for (int i = 0; i < Q::NUMBERS; i++) x[row][i] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < Q::NUMBERS; i += 4) {
                int channel = first + i / Q::RUN * Q::SPAN + tid * Q::RUN + i % Q::RUN;
                store_four<KEYS>(tile, token, channel, slice, x[row] + i);
            }
        }
    }
}

// Equalizer of a part, as numbers and reciprocals; `from` is (KD) pairs in shared memory.
__device__ __forceinline__ void load_equalizer(float (&e)[16], float (&r)[16], const float2* from, int part) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        int channel = first_channel<true>(part) + (i & 7) + (i < 8 ? 0 : Side<true>::HADAMARD / 2);
        float4 pair = *reinterpret_cast<const float4*>(from + channel);
        e[i] = pair.x, r[i] = pair.y, e[i + 1] = pair.z, r[i + 1] = pair.w;
    }
}

// Rotation by butterflies, operation by operation that of the reference, or none: a thread takes 16 channels of a token
// at a time.
template <bool KEYS>
__device__ __forceinline__ void fill_by_butterflies(
    float* tile, const u8* numbers, int token_stride, int slice, const float2* equalizer, Block& shared) {
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
        load_part<KEYS>(x, numbers + (i64)t * token_stride, part);
        if constexpr (EQUALIZE) {
            if constexpr (!STAY) load_equalizer(e, r, equalizer, part);
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = divide<S::EXACT>(x[i], e[i], r[i]);
        }
        if constexpr (S::ROTATE) rotate<KEYS>(x, part);
        if constexpr (KEYS && NORM != 0) divide_by_norm<S::EXACT>(x, shared.norms[t], 1.0f);
        if constexpr (KEYS && NORM == 0) note_broken(shared, t, x);
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            int channel = first_channel<KEYS>(part) + (i & 7) + (i < 8 ? 0 : S::HADAMARD / 2);
            store_four<KEYS>(tile, t, channel, slice, x + i);
        }
    }
}

// Fill the tile, float32 (128, PITCH), with channels SLICE * slice on; `numbers` is the head's first token of the block.
template <bool KEYS>
__device__ __forceinline__ void fill_tile(
    float* tile, const u8* numbers, int token_stride, int slice, const float2* equalizer, Block& shared) {
    using S = Side<KEYS>;
    if constexpr (S::TENSOR)
        fill_by_tensor_cores<KEYS>(tile, numbers, token_stride, slice, equalizer, shared);
    else
        fill_by_butterflies<KEYS>(tile, numbers, token_stride, slice, equalizer, shared);
    __syncthreads();
    if constexpr (KEYS ? NORM == 0 : !S::TENSOR) {  // values of sinks, and keys that are not finite and have no norm
        if (shared.broken[0] | shared.broken[1] | shared.broken[2] | shared.broken[3]) {
            for (int i = threadIdx.x; i < BLOCK_TOKENS * S::PITCH; i += THREADS)
                if (shared.is_broken(i / S::PITCH)) tile[i] = 0.0f;
            __syncthreads();
        }
    }
}
