// A token on its way into a block: the arguments, the shape of a side, and step 1 and 2 of the method (equalize,
// rotate, divide by the norm) on 16 of its channels. For the defines see encode.cuh.
#pragma once
#include "common.cuh"

struct Args {
    const u8 *keys, *values;                       // (rows, heads, tokens, D)
    i64 key_row, key_head, value_row, value_head;  // strides in bytes
    int key_token, value_token;
    const int* starts;                             // (rows): token at which the first block to encode starts
    const int* counts;                             // (rows): blocks to encode
    const int* places;                             // (rows): where in the row's records the first one goes
    float* equalizer;                              // (rows, heads, KD)
    u8* records;                                   // (rows, blocks, heads, RECORD)
    i64 record_row, record_block;                  // strides in bytes
    u16* norms;                                    // (rows, blocks, 1 or heads, 128)
    i64 norm_row, norm_block;                      // strides in elements
    int heads, num_sinks;
    u8 *sink_keys, *sink_values;                   // (rows, heads, num_sinks, D)
    float exponent, query_exponent;                // of the equalizer
    const double* query_power;                     // (rows, heads, KD): sums of squares of queries, or null
    // of flush.cu alone
    int rows, tokens, capacity, residual_length;   // tokens: new ones
    u8 *tail_keys, *tail_values;                   // (rows, heads, capacity, D)
    int* lengths;                                  // (rows): tokens in the tail before a pass
    int* totals;                                   // (rows): and with it, between append and flush
    int* num_blocks;                               // (rows): packed blocks
    int* blocks_before;                            // (rows): and those before a pass
    u32* arrived;                                  // CTAs at a barrier
    u32* norms_done;                               // (rows): groups of tokens that have their norms
};

// A block to pack: the token at which it starts, and its place in the row's records.
struct Spot {
    int row, start, place;
};

constexpr int ITEM = DTYPE == DTYPE_F32 ? 4 : 2;  // bytes of a number of the model

__host__ __device__ constexpr float inverse_root(int power_of_two) {
    float root = 1.0f;
    for (; power_of_two >= 4; power_of_two /= 4) root *= 0.5f;
    return power_of_two == 2 ? root * 0.70710678118654752440f : root;
}

template <bool KEYS>
struct Side {
    static constexpr int DIM = KEYS ? KD : VD;
    static constexpr int BITS = KEYS ? KBITS : VBITS;
    static constexpr int GROUP = KEYS ? KGROUP : VGROUP;
    static constexpr bool ROTATE = KEYS ? ROTK : ROTV;
    static constexpr bool LSTSQ = KEYS ? KFIT : VFIT;
    static constexpr float STEP = KEYS ? KSTEP : VSTEP;
    static constexpr float GAIN = KEYS ? 1.0f : VGAIN;  // of the stored scale over that of the codes
    static constexpr float UNGAIN = KEYS ? 1.0f : VUNGAIN;
    static constexpr int CODES = KEYS ? 0 : VALUE_CODES;
    static constexpr int SCALE = KEYS ? KEY_SCALE : VALUE_SCALE;
    static constexpr int CENTER = KEYS ? KEY_CENTER : VALUE_CENTER;

    // Whether every operation is that of the reference, division included. Where sums come in (norms, least squares),
    // which round differently than on the CPU, a code may be off by one anyway if a number is within a rounding error
    // of a threshold. But without rotation the numbers are the model's own, which may be round and lie on thresholds.
    static constexpr bool EXACT = !ROTATE || BITS == 8 || !(KEYS ? NORM == 1 || NORM == 3 || LSTSQ : LSTSQ);

    static constexpr int LEVELS = (1 << BITS) - 1;
    static constexpr float HALF = 0.5f * LEVELS;
    static constexpr int HADAMARD = DIM & -DIM;
    static constexpr int LANES = HADAMARD / 16;  // lanes that share a Hadamard block of a token
    static constexpr int PARTS = DIM / 16;       // lanes that share a token
    static constexpr int TILES = DIM / 16;       // channel tiles
    static constexpr int PART = GROUP < 64 ? GROUP : 64;  // elements of a group that one thread holds
    static constexpr int SPLIT = GROUP / PART;            // threads that share a group
    static constexpr int GROUPS = BLOCK_TOKENS * DIM / GROUP;

    static constexpr int SLICE = KEYS ? KSLICE : VSLICE;
    static constexpr int SLICES = DIM / SLICE;
    static constexpr bool TENSOR =  // see tensor_rotate.cuh
        ROTATE && !EXACT && DTYPE != DTYPE_F32 && HADAMARD <= 128 && SLICES == 1;
    static constexpr float UNIT = !KEYS && TENSOR ? inverse_root(HADAMARD) : 1.0f;  // of the numbers in the tile
    static constexpr int PITCH = (SLICE + 31) / 32 * 32;  // of the tile, see `swizzle`
    static constexpr int BYTES = GROUPS * 16 + BLOCK_TOKENS * PITCH * 4 + (KEYS && EQUAL ? KD * 8 : 0);
    static_assert(BITS == 16 || BYTES <= SHARED, "shared memory");
    static_assert(DIM % SLICE == 0 && SLICE % 16 == 0 && (KEYS || SLICE % GROUP == 0 || BITS == 16), "slices");
};

// Place of a token's norm: (gid, token tile, r & 1).
__device__ __forceinline__ int norm_order(int token) { return (token & 7) * 16 + (token >> 4) * 2 + (token >> 3 & 1); }

// A token is split into parts of 16 channels: 8 from first_channel on and 8 that lie half a Hadamard block further.
// So loads are 16 bytes, coalesced, and only the butterflies of the steps between cross lanes.
template <bool KEYS>
__device__ __forceinline__ int first_channel(int part) {
    using S = Side<KEYS>;
    return part / S::LANES * S::HADAMARD + part % S::LANES * 8;
}

template <bool KEYS>
__device__ __forceinline__ void load_part(float (&x)[16], const u8* token, int part) {
    const u8* from = token + first_channel<KEYS>(part) * ITEM;
    load_elements<DTYPE>(x, from);
    load_elements<DTYPE>(x + 8, from + Side<KEYS>::HADAMARD / 2 * ITEM);
}

__device__ __forceinline__ void butterfly(float& low, float& high) {
    float sum = low + high;
    high = low - high;
    low = sum;
}

template <bool KEYS>
__device__ __forceinline__ void rotate(float (&x)[16], int part) {
    using S = Side<KEYS>;
#pragma unroll
    for (int step = 1; step <= 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (!(i & step)) butterfly(x[i], x[i + step]);
#pragma unroll
    for (int lane = 1; lane < S::LANES; lane *= 2) {  // steps 8 to HADAMARD / 4
        float sign = part & lane ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = fmaf(x[i], sign, __shfl_xor_sync(ALL_LANES, x[i], lane));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) butterfly(x[i], x[i + 8]);  // step HADAMARD / 2
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] *= inverse_root(S::HADAMARD);
}

// x / y by r = 1 / y. EXACT: the remainder of the quotient makes it what IEEE division gives, at a third of the price.
template <bool EXACT>
__device__ __forceinline__ float divide(float x, float y, float r) {
    float q = x * r;
    return EXACT ? fmaf(fmaf(-q, y, x), r, q) : q;
}

// keys / norm; 0 where the norm is zero or not finite
template <bool EXACT>
__device__ __forceinline__ void divide_by_norm(float (&x)[16], float norm) {
    if (__builtin_expect(!(norm > 1e-30f && norm < 1e30f), 0)) {
        // not usable, or too near the ends of float32 to have a reciprocal
        bool usable = norm > 0.0f && is_finite(norm);
        float factor = norm < 1.0f ? 1.2676506e30f : 7.8886091e-31f;  // 2^100, 2^-100
        norm = usable ? norm * factor : 1.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = usable ? x[i] * factor : 0.0f;
    }
    float reciprocal = 1.0f / norm;
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = divide<EXACT>(x[i], norm, reciprocal);
}
