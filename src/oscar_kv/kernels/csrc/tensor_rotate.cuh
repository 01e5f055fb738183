// The rotation on tensor cores, for 16-bit numbers where a sum in another order does no harm (see Side::TENSOR).
//
// A Hadamard matrix of size n is that of size n / 16 applied to the upper bits of the channel and that of size 16 to
// four other bits, in any order. A warp takes 16 tokens: for the bits 0, 1 and those in which the lanes of a quad differ
// it multiplies by the matrix of size 16, whose entries are signs; for the other bits a lane has all numbers itself and
// does butterflies. The equalizer is a factor of the matrix: as a sum of numbers of the model's format, with products
// and sums in float32.
#pragma once
#include "transform.cuh"

// What a quad of lanes holds of a token: runs of RUN channels side by side, SPAN in all, of each of which lane tid of the
// quad holds run tid.
template <bool KEYS>
struct Quad {
    static constexpr int HADAMARD = Side<KEYS>::HADAMARD;
    static constexpr int RUN = HADAMARD < 32 ? 4 : 8;
    static constexpr int SPAN = 4 * RUN;
    static constexpr int NUMBERS = HADAMARD / 4;  // of one lane
};

// Terms that add up to the reciprocal of the equalizer, of 8 or 11 bits each. A power of two keeps the last term of
// fp16 away from its smallest numbers: the equalizer lies between 2^-10 and 2^9.
constexpr int TERMS = DTYPE == DTYPE_BF16 ? 3 : 2;
constexpr float TERMS_UNIT = DTYPE == DTYPE_BF16 ? 1.0f : 32.0f;

__device__ __forceinline__ u16 to_model(float x) { return DTYPE == DTYPE_BF16 ? float_to_bf16(x) : float_to_f16(x); }
__device__ __forceinline__ float from_model(u16 bits) {
    return DTYPE == DTYPE_BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Reciprocals of the equalizer of 4 channels: pairs of first terms and pairs of second terms to `upper`, third to `lower`.
__device__ __forceinline__ void split_equalizer(const float* equalizer, uint4& upper, uint2& lower) {
    u32 pairs[6] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float rest = TERMS_UNIT / equalizer[i];
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            u16 bits = to_model(rest);
            pairs[2 * term + i / 2] |= (u32)bits << (16 * (i & 1));
            rest -= from_model(bits);
        }
    }
    upper = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    lower = make_uint2(pairs[4], pairs[5]);
}

// c += a b for 16 x 16 numbers of the model and 16 x 8
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == 0
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Pairs of channels of one row of a Hadamard block
template <bool KEYS>
__device__ __forceinline__ void load_row(u32 (&pairs)[Side<KEYS>::HADAMARD / 8], const u8* numbers, int tid) {
    using Q = Quad<KEYS>;
#pragma unroll
    for (int i = 0; i < Q::NUMBERS / Q::RUN; i++) {
        const u8* from = numbers + (i * Q::SPAN + tid * Q::RUN) * ITEM;
        if constexpr (Q::RUN == 8) {
            uint4 four = *reinterpret_cast<const uint4*>(from);
            pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y, pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
        } else {
            uint2 two = *reinterpret_cast<const uint2*>(from);
            pairs[2 * i] = two.x, pairs[2 * i + 1] = two.y;
        }
    }
}

// Rotate a Hadamard block of 16 tokens, up to the factor of the matrix (and TERMS_UNIT): `numbers` of the lane's two
// tokens (rows gid and gid + 8) -> x[row][run by run]. The equalizer is that of the Hadamard block.
template <bool KEYS>
__device__ __forceinline__ void tensor_rotate(
    float (&x)[2][Side<KEYS>::HADAMARD / 4], const u8* numbers, i64 eight_tokens, const uint4* upper,
    const uint2* lower) {
    using Q = Quad<KEYS>;
    const int gid = threadIdx.x % 32 / 4, tid = threadIdx.x % 4;
    u32 pairs[2][Q::NUMBERS / 2];
    load_row<KEYS>(pairs[0], numbers, tid);
    load_row<KEYS>(pairs[1], numbers + eight_tokens, tid);
    const u32 odd = __popc(2 * tid & gid) & 1;  // entry (k, n) of the matrix is -1 where k & n has an odd number of bits
    const u32 signs = odd << 15 | (odd ^ (gid & 1)) << 31;  // of k = 2 tid and 2 tid + 1, n = gid
#pragma unroll
    for (int i = 0; i < Q::NUMBERS; i += 4) {
        const u32 a[4] = {pairs[0][i / 2], pairs[1][i / 2], pairs[0][i / 2 + 1], pairs[1][i / 2 + 1]};
        float c[2][4] = {};  // n < 8 and n >= 8
        if constexpr (KEYS && EQUAL) {
            const int four = (i / Q::RUN * Q::SPAN + tid * Q::RUN + i % Q::RUN) / 4;
            const uint4 terms = upper[four];
            const u32 low[2] = {terms.x, terms.z}, high[2] = {terms.y, terms.w};
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                uint2 pair = term < 2 ? make_uint2(low[term % 2], high[term % 2]) : lower[four];
                multiply_add(c[0], a, pair.x ^ signs, pair.y ^ signs);
                multiply_add(c[1], a, pair.x ^ signs, pair.y ^ signs ^ 0x80008000u);
            }
        } else {
            const u32 ones = (DTYPE == DTYPE_BF16 ? 0x3f803f80u : 0x3c003c00u) ^ signs;
            multiply_add(c[0], a, ones, ones);
            multiply_add(c[1], a, ones, ones ^ 0x80008000u);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int row = 0; row < 2; row++) x[row][i + j] = c[j / 2][2 * row + j % 2];
    }
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
        for (int step = 4; step < Q::NUMBERS; step *= 2)
#pragma unroll
            for (int i = 0; i < Q::NUMBERS; i++)
                if (!(i & step)) butterfly(x[row][i], x[row][i + step]);
}
