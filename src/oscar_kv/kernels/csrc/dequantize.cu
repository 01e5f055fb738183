// Records -> keys and values in the model's dtype, as they were quantized: the GPU form of codec.dequantize_blocks,
// with the token norms multiplied into the keys.
//
// One CTA per block, KV head and side. A warp unpacks a channel tile of all 128 tokens into shared memory, from where
// the numbers leave in rows of tokens, up to 128 channels at a time. Compile with -fmad=false: then every number is
// that of the reference, rounded once.
//
// Defines. Of each side X = K, V: XD head dimension, XBITS, XGROUP. DTYPE (16-bit ones), META: see common.cuh.
// NORM 0 none, 1 one norm over all heads, 2 one per head. THREADS. RECORD, KEY_SCALE, KEY_CENTER, UNITS, VALUE_CODES,
// VALUE_SCALE, VALUE_CENTER: bytes of a record and of what lies before each section.

#include "common.cuh"

struct Args {
    const u8* records;             // (rows, blocks, heads, RECORD)
    i64 record_row, record_block;  // strides in bytes
    const u16* norms;              // (rows, blocks, 1 or heads, 128)
    i64 norm_row, norm_block;      // strides in elements
    u16 *keys, *values;            // (rows, heads, 128 * blocks, D)
};

template <bool KEYS>
struct Side {
    static constexpr int DIM = KEYS ? KD : VD;
    static constexpr int BITS = KEYS ? KBITS : VBITS;
    static constexpr int GROUP = KEYS ? KGROUP : VGROUP;
    static constexpr int CODES = KEYS ? 0 : VALUE_CODES;
    static constexpr int SCALE = KEYS ? KEY_SCALE : VALUE_SCALE;
    static constexpr int CENTER = KEYS ? KEY_CENTER : VALUE_CENTER;
    static constexpr int TILES = DIM / 16;
    static constexpr int SLICE = TILES < 8 ? TILES : 8;  // channel tiles in shared memory at a time
    static constexpr int PITCH = 16 * SLICE + 8;         // the warps' writes meet no bank twice
    static constexpr int WIDTH = BITS == 3 ? 2 : BITS, PER_WORD = 16 / WIDTH;
    static constexpr float HALF = 0.5f * ((1 << BITS) - 1);
};

__device__ __forceinline__ float load_metadata(const u8* section, int index) {
    if constexpr (META == META_E4M3) return e4m3_to_float(section[index]);
    u16 bits = reinterpret_cast<const u16*>(section)[index];
    return META == META_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

__device__ __forceinline__ u16 to_model(float x) { return DTYPE == DTYPE_F16 ? float_to_f16(x) : float_to_bf16(x); }

// All tokens of channel tile `channels`, to column `column` of the shared tile (128, PITCH). pack.py says where the
// codes of a lane lie, and in which order the norms (128).
template <bool KEYS>
__device__ __forceinline__ void unpack_tile(
    u16* tile, const u8* record, const u16* norms, int channels, int column, int lane, float unit) {
    using S = Side<KEYS>;
    const int gid = lane >> 2, tid = lane & 3;
    const uint4* words = reinterpret_cast<const uint4*>(record + S::CODES) + channels * 32 + lane;
    u32 word[4], high[2] = {0, 0};
    if constexpr (S::BITS == 3) {
        const uint2* plane = reinterpret_cast<const uint2*>(record + S::CODES + BLOCK_TOKENS * S::DIM / 4);
        uint2 pair = plane[channels * 32 + lane];
        high[0] = pair.x, high[1] = pair.y;
    }
#pragma unroll
    for (int p = 0; p < BLOCK_TOKENS / 16; p++) {
        if (p % S::PER_WORD == 0) {
            uint4 four = words[p / S::PER_WORD * S::TILES * 32];
            word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
        }
        const int group = KEYS ? 16 * p / S::GROUP * S::DIM + 16 * channels
                               : 16 * channels / S::GROUP * BLOCK_TOKENS + 16 * p;
#pragma unroll
        for (int r1 = 0; r1 < 2; r1++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int index = group + 4 * tid + 2 * r1 + h, line = 2 * tid + 8 * r1 + h;
                float scale = load_metadata(record + S::SCALE, index) * unit;
                float center = load_metadata(record + S::CENTER, index) * unit;
#pragma unroll
                for (int r0 = 0; r0 < 2; r0++) {
                    u32 code = word[2 * r1 + r0] >> (16 * h + S::WIDTH * (p % S::PER_WORD)) & ((1 << S::WIDTH) - 1);
                    if constexpr (S::BITS == 3) code |= (high[r1] >> (16 * h + 2 * p + r0) & 1) << 2;
                    float x = ((float)code - S::HALF) * scale + center;
                    const int row = gid + 8 * r0;
                    if constexpr (KEYS) {
                        if (NORM) x *= bf16_to_float(norms[gid * 16 + 2 * p + r0]);
                        tile[(16 * p + row) * S::PITCH + column + line] = to_model(x);
                    } else {
                        tile[(16 * p + line) * S::PITCH + column + row] = to_model(x);
                    }
                }
            }
    }
}

// A side of a record to `out` (128, DIM).
template <bool KEYS>
__device__ __forceinline__ void dequantize_side(u16* tile, const u8* record, const u16* norms, u16* out) {
    using S = Side<KEYS>;
    if constexpr (S::BITS == 16) {
        const uint4* from = reinterpret_cast<const uint4*>(record + S::CODES);
        for (int i = threadIdx.x; i < BLOCK_TOKENS * S::DIM / 8; i += THREADS)
            reinterpret_cast<uint4*>(out)[i] = from[i];
    } else {
        const float unit = reinterpret_cast<const float*>(record + UNITS)[KEYS ? 0 : 1];
        for (int first = 0; first < S::TILES; first += S::SLICE) {
            const int tiles = min(S::SLICE, S::TILES - first);
            if (first) __syncthreads();  // the tile has been read
            for (int i = threadIdx.x / 32; i < tiles; i += THREADS / 32)
                unpack_tile<KEYS>(tile, record, norms, first + i, 16 * i, threadIdx.x % 32, unit);
            __syncthreads();
            for (int i = threadIdx.x; i < BLOCK_TOKENS * 2 * tiles; i += THREADS) {
                const int token = i / (2 * tiles), channel = i % (2 * tiles) * 8;
                *reinterpret_cast<uint4*>(out + token * S::DIM + 16 * first + channel) =
                    *reinterpret_cast<const uint4*>(tile + token * S::PITCH + channel);
            }
        }
    }
}

// Grid (2 * blocks, heads, rows): keys and values alternate.
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_blocks(const __grid_constant__ Args a) {
    constexpr int PITCH = Side<true>::PITCH > Side<false>::PITCH ? Side<true>::PITCH : Side<false>::PITCH;
    __shared__ uint4 shared[BLOCK_TOKENS * PITCH / 8];
    u16* tile = reinterpret_cast<u16*>(shared);  // (128, PITCH)
    const int block = blockIdx.x / 2, head = blockIdx.y, row = blockIdx.z;
    const u8* record = a.records + row * a.record_row + block * a.record_block + (i64)head * RECORD;
    const i64 place = ((i64)row * gridDim.y + head) * (gridDim.x / 2) + block;
    if (blockIdx.x % 2) {
        dequantize_side<false>(tile, record, nullptr, a.values + place * BLOCK_TOKENS * VD);
    } else {
        const u16* norms = a.norms + row * a.norm_row + block * a.norm_block + (NORM == 2 ? head * BLOCK_TOKENS : 0);
        dequantize_side<true>(tile, record, norms, a.keys + place * BLOCK_TOKENS * KD);
    }
}
