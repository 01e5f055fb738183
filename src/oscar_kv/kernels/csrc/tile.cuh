// A block of one side on its way from global to shared memory: equalized, rotated, divided by the norms.
#pragma once
#include "tensor_rotate.cuh"

// Where channel c of token t lies in its row of the tile. Bits of t are added to bank bits 2 to 4 such that no bank is
// met twice, neither when lanes store pairs of channels of 4 tokens or 4 channels of one, nor when they read 4 channels
// of 8 tokens or, in fragment order, pairs of channels of 8 tokens or channels of 4 pairs of tokens. It is linear in
// the bits of t and c: swizzle(t ^ u, c ^ d) == swizzle(t, c) ^ swizzle(u, d), so that few addresses are worked out.
__host__ __device__ constexpr int swizzle(int t, int c) {
    return c ^ (c >> 3 & 4) ^ (t & 1) * 24 ^ (t >> 1 & 1) * 12 ^ (t >> 2 & 1) * 16;
}

// place ^ offset where place has no bits of offset above the lowest 5: the upper bits become part of the instruction.
__device__ __forceinline__ int combine(int place, int offset) { return (place ^ (offset & 31)) + (offset & ~31); }

// What lies in shared memory for all threads, of the keys or values of one block
struct Block {
    u32 excluded[4], broken[4], largest;  // tokens out of the statistics, tokens that count as 0
    float norms[BLOCK_TOKENS];            // for tensor cores: what `tensor_rotate` leaves out, over the norm
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

// Rotation by tensor cores: a warp takes 16 tokens of one Hadamard block at a time, its items. The numbers of the next
// item are on their way while it works on one.
template <bool KEYS>
struct Items {
    using S = Side<KEYS>;
    static constexpr int BLOCKS = S::DIM / S::HADAMARD, END = BLOCK_TOKENS / 16 * BLOCKS;
    static __device__ __forceinline__ int token(int item) { return item / BLOCKS * 16; }
    static __device__ __forceinline__ int channel(int item) { return item % BLOCKS * S::HADAMARD; }

    static __device__ __forceinline__ void load(Pairs<KEYS>& pairs, const u8* numbers, int token_stride, int item) {
        if (item < END) pairs.load(numbers + (i64)token(item) * token_stride + channel(item) * ITEM, token_stride);
    }
};

template <bool KEYS>
__device__ __forceinline__ void fill_by_tensor_cores(
    float* tile, const u8* numbers, int token_stride, Pairs<KEYS>& pairs, const float2* equalizer, Block& shared) {
    using S = Side<KEYS>;
    using R = Rotated<KEYS>;
    const uint4* upper = reinterpret_cast<const uint4*>(equalizer);
    const uint2* lower = reinterpret_cast<const uint2*>(upper + S::DIM / 4);
    for (int item = threadIdx.x / 32; item < Items<KEYS>::END; item += THREADS / 32) {
        const int first = Items<KEYS>::channel(item), first_token = Items<KEYS>::token(item);
        R rotated;
        tensor_rotate<KEYS>(rotated, pairs, upper + first / 4, lower + first / 4);
        Items<KEYS>::load(pairs, numbers, token_stride, item + THREADS / 32);
        const int place = swizzle(R::token(0), first + R::lane_channel());
        auto store_token = [&](int i, const float(&x)[R::NUMBERS]) {
            float* row = tile + (first_token + R::token(i)) * S::PITCH;
#pragma unroll
            for (int j = 0; j < R::NUMBERS; j += 2)
                *reinterpret_cast<float2*>(row + combine(place, swizzle(i % 2, R::first_channel(j / 2)))) =
                    make_float2(x[j], x[j + 1]);
        };
        float factors[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = first_token + R::token(i);
            factors[i] = KEYS ? shared.norms[t] : shared.is_broken(t) ? 0.0f : 1.0f;
#pragma unroll
            for (int j = 0; KEYS && j < R::NUMBERS; j++) rotated.x[i][j] *= factors[i];  // of values: in the scales
            if constexpr (KEYS && NORM == 0) note_broken(shared, t, rotated.x[i]);
            store_token(i, rotated.x[i]);
        }
        if (__builtin_expect(fminf(fminf(factors[0], factors[1]), fminf(factors[2], factors[3])) == 0.0f, 0)) {
            const float zeros[R::NUMBERS] = {};  // even if the numbers were not finite
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (factors[i] == 0.0f) store_token(i, zeros);
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
        if constexpr (KEYS && NORM != 0) divide_by_norm<S::EXACT>(x, shared.norms[t]);
        if constexpr (KEYS && NORM == 0) note_broken(shared, t, x);
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            int channel = first_channel<KEYS>(part) + (i & 7) + (i < 8 ? 0 : S::HADAMARD / 2) - slice * S::SLICE;
            if (S::SLICES > 1 && (unsigned)channel >= (unsigned)S::SLICE) continue;
            float4* to = reinterpret_cast<float4*>(tile + t * S::PITCH + swizzle(t, channel));
            *to = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        }
    }
}

// Zero the tokens that count as 0.
template <bool KEYS>
__device__ __forceinline__ void zero_broken(float* tile, const Block& shared) {
    using S = Side<KEYS>;
    if (!(shared.broken[0] | shared.broken[1] | shared.broken[2] | shared.broken[3])) return;
    for (int i = threadIdx.x; i < BLOCK_TOKENS * S::PITCH; i += THREADS)
        if (shared.is_broken(i / S::PITCH)) tile[i] = 0.0f;
    __syncthreads();
}
