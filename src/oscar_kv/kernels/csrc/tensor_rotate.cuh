// The rotation on tensor cores, for 16-bit numbers where a sum in another order does no harm (see Side::TENSOR).
//
// A Hadamard matrix of size n is one of size 16 applied to any four bits of the channel and one of size n / 16 applied
// to the others. A warp takes 16 tokens: for channel bits 0 and 1 and the two in which the lanes of a quad differ it
// multiplies by the matrix of size 16, whose entries are signs; for the other bits a lane has all numbers itself and
// does butterflies. The equalizer is a factor of the matrix, as a sum of numbers of the model's format; products and
// sums are float32.
#pragma once
#include "transform.cuh"

// Lane tid of a quad loads RUN channels side by side, the quad SPAN, and the lanes multiply 4 of each at a time, from
// first_channel(i) on. Of the 16 results of a token a lane gets two: channel first_channel(i) + lane_channel() and the
// next.
template <bool KEYS>
struct Rotated {
    static constexpr int HADAMARD = Side<KEYS>::HADAMARD;
    static constexpr int RUN = HADAMARD < 32 ? 4 : 8;
    static constexpr int SPAN = 4 * RUN;
    static constexpr int NUMBERS = HADAMARD / 8;  // results of one token in a lane
    float x[4][NUMBERS];                          // of tokens 2 tid, 2 tid + 1, 2 tid + 8 and 2 tid + 9

    static __device__ __forceinline__ int token(int i) { return 2 * (threadIdx.x % 4) + i % 2 + 8 * (i / 2); }
    static __device__ __forceinline__ int first_channel(int i) { return 4 * i / RUN * SPAN + 4 * i % RUN; }
    static __device__ __forceinline__ int lane_channel() {
        const int gid = threadIdx.x % 32 / 4;
        return gid / 2 * RUN + gid % 2 * 2;
    }
};

// Terms that add up to the reciprocal of the equalizer, of 8 or 11 bits each. A power of two keeps the last term of
// fp16 away from its smallest numbers: the equalizer lies between 2^-10 and 2^9.
constexpr int TERMS = DTYPE == DTYPE_BF16 ? 3 : 2;
constexpr float TERMS_UNIT = DTYPE == DTYPE_BF16 ? 1.0f : 32.0f;

__device__ __forceinline__ u16 to_model(float x) { return DTYPE == DTYPE_BF16 ? float_to_bf16(x) : float_to_f16(x); }
__device__ __forceinline__ float from_model(u16 bits) {
    return DTYPE == DTYPE_BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Reciprocal of the equalizer of a channel -> its terms. `upper` (KD / 4) holds the first terms of 4 channels and the
// second ones, `lower` (KD / 4) the third.
__device__ __forceinline__ void split_equalizer(float equalizer, int channel, uint4* upper, uint2* lower) {
    u16* to = reinterpret_cast<u16*>(upper) + channel / 4 * 8 + channel % 4;
    float rest = TERMS_UNIT * fast_reciprocal(equalizer);
    u16 first = to_model(rest), second = to_model(rest - from_model(first));
    to[0] = first, to[4] = second;
    if (TERMS == 3)
        reinterpret_cast<u16*>(lower)[channel] = to_model(rest - from_model(first) - from_model(second));
}

// c = a b + c for 16 x 16 numbers of the model and 16 x 8; c counts as 0 where FRESH
template <bool FRESH>
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == 0
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
    if constexpr (FRESH)
        asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    else
        asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#undef MMA
}

// Channels that a lane multiplies of one Hadamard block, as pairs: of tokens gid and gid + 8. `numbers` is the block of
// the first of 16 tokens.
template <bool KEYS>
struct Pairs {
    u32 of[2][Side<KEYS>::HADAMARD / 8];

    __device__ __forceinline__ void load(const u8* numbers, int token_stride) {
        using R = Rotated<KEYS>;
        numbers += (i64)(threadIdx.x % 32 / 4) * token_stride + threadIdx.x % 4 * R::RUN * ITEM;
#pragma unroll
        for (int half = 0; half < 2; half++, numbers += (i64)8 * token_stride)
#pragma unroll
            for (int i = 0; i < R::HADAMARD / R::SPAN; i++) {
                u32* to = of[half] + i * R::RUN / 2;
                if constexpr (R::RUN == 8) {
                    uint4 four = stream16(numbers + i * R::SPAN * ITEM);
                    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
                } else {
                    uint2 two = stream8(numbers + i * R::SPAN * ITEM);
                    to[0] = two.x, to[1] = two.y;
                }
            }
    }
};

// Rotate a Hadamard block of 16 tokens, up to the factor of the matrix and TERMS_UNIT; `upper` and `lower` are its
// equalizer.
template <bool KEYS>
__device__ __forceinline__ void tensor_rotate(
    Rotated<KEYS>& to, const Pairs<KEYS>& pairs, const uint4* upper, const uint2* lower) {
    using R = Rotated<KEYS>;
    const int gid = threadIdx.x % 32 / 4, tid = threadIdx.x % 4;

    // Signs of the matrix as left operand: rows n = gid and gid + 8, columns k = 2 tid, 2 tid + 1 and these + 8. Bits
    // of k are channel bits (0, tid, 1), bits of n (1, tid, 0); -1 where an odd number of them are common.
    constexpr u32 BOTH = 0x80008000u, SECOND = 0x80000000u;
    const u32 near = __popc(gid / 2 & tid) & 1 ? BOTH : 0, far = gid & 1 ? near ^ BOTH : near;
    const u32 signs[4] = {near, near ^ SECOND, far, far ^ SECOND};
#pragma unroll
    for (int i = 0; i < R::NUMBERS; i += 2) {
        const int four = (R::first_channel(i / 2) + tid * R::RUN) / 4;  // that the lane multiplies
        constexpr int COUNT = KEYS && EQUAL ? TERMS : 1;
        u32 factor[3][2] = {};
        if constexpr (KEYS && EQUAL) {
            const uint4 terms = upper[four];
            factor[0][0] = terms.x, factor[0][1] = terms.y, factor[1][0] = terms.z, factor[1][1] = terms.w;
            if constexpr (TERMS == 3) factor[2][0] = lower[four].x, factor[2][1] = lower[four].y;
        } else {
            factor[0][0] = factor[0][1] = DTYPE == DTYPE_BF16 ? 0x3f803f80u : 0x3c003c00u;  // 1, 1
        }
        float c[2][4];
#pragma unroll
        for (int term = COUNT - 1; term >= 0; term--) {  // small ones first
            const u32 a[4] = {factor[term][0] ^ signs[0], factor[term][0] ^ signs[1], factor[term][1] ^ signs[2],
                              factor[term][1] ^ signs[3]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (term == COUNT - 1)
                    multiply_add<true>(c[half], a, pairs.of[half][i], pairs.of[half][i + 1]);
                else
                    multiply_add<false>(c[half], a, pairs.of[half][i], pairs.of[half][i + 1]);
            }
        }
#pragma unroll
        for (int t = 0; t < 4; t++) to.x[t][i] = c[t / 2][t % 2], to.x[t][i + 1] = c[t / 2][2 + t % 2];
    }
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int step = 2; step < R::NUMBERS; step *= 2)
#pragma unroll
            for (int i = 0; i < R::NUMBERS; i++)
                if (!(i & step)) butterfly(to.x[t][i], to.x[t][i + step]);
}
