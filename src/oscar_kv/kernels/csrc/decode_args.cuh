// What the kernels of decode.cu are given, and the sizes that follow from their definitions.
#pragma once
#include "launch.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int KT = KD / 16, VT = VD / 16;           // channel tiles
constexpr int KG = 128 / KGROUP, VG = VD / VGROUP;  // groups of a block
constexpr int MB = META == 2 ? 1 : 2;               // bytes of a scale or center
constexpr int COLS = 8 * NT;
constexpr int K_CODES = 16 * KD * KBITS, V_CODES = 16 * VD * VBITS;
constexpr int K_SCALE = K_CODES, K_UNITS = K_SCALE + 2 * KG * KD * MB, K_BYTES = K_UNITS + 16;
constexpr int V_SCALE = V_CODES, V_BYTES = V_SCALE + 2 * VG * 128 * MB;
constexpr int NORM_BYTES = NORM ? 256 : 0;
constexpr int K_STAGE = K_BYTES + NORM_BYTES, V_STAGE = V_BYTES;
constexpr int Q_FRAGMENTS = NT * KT * 32 * QCOLS, Q_BYTES = Q_FRAGMENTS + 16;  // and NT factors
constexpr int STAGE = (K_STAGE + V_STAGE + Q_BYTES + 127) / 128 * 128;  // shared memory of a warp
constexpr float K_LEVELS = (1 << KBITS) - 1, V_LEVELS = (1 << VBITS) - 1;
// P enters the value product times 2^(P_SHIFT - pexp): inside fp16's normal range with scales up to 1 (256 for e4m3)
constexpr int P_SHIFT = META == 2 ? 6 : 13;
constexpr int K_UNROLL = 2;  // channel tiles of the score loop side by side: more only grows the code
constexpr float LOG2E = 1.4426950408889634f;
#define NEG_INF __int_as_float(0xff800000)

// Position of token tile p inside a masked word, as a power of two
__host__ __device__ constexpr int pexp(int bits, int p) {
  return bits == 8 ? 0 : bits == 4 ? 4 * (p & 1) : 2 * (p < 5 ? p : p - 5);
}
__host__ __device__ constexpr float pow2(int e) { return e < 0 ? 1.0f / (1u << -e) : (float)(1u << e); }
constexpr int VE = VBITS == 8 ? 0 : VBITS == 4 ? 4 : 8;  // largest pexp of the values

struct Piece {  // of blocks that caches share: as if it had block 0, `row` bytes from row to row, up to block `end`
  long records, norms, record_row, norm_row, end;
};

struct Args {
  const u16* q;  // (batch, query heads, QL, KD) strided
  long q_row, q_head, q_tok;
  const char* records;  // row * rec_row + block * rec_block + head * record bytes; with a table: entry * rec_block
  long rec_row, rec_block;
  const char* norms;
  long norm_row, norm_block;
  const int* table;  // (batch, table_row) pages, or null
  long table_row;
  const Piece* pieces;  // of the blocks before `first`, which `records` does not have, or null
  const int* num_blocks;  // (batch)
  const int* tail_len;    // (batch): tokens in the tail but for the `fresh` newest
  const float* equalizer;  // (batch, heads, KD)
  const u16 *sink_k, *sink_v;  // (batch, heads, sinks, dim) contiguous
  const u16 *tail_k, *tail_v;  // row * tail_row + head * tail_head + token * dim, tail_*_v for values
  long tail_row_k, tail_head_k, tail_row_v, tail_head_v;
  u16* out;  // (batch, QL, query heads, VD) contiguous
  const float* sink_logits;  // (query heads) or null
  char* rotated;    // (batch, pairs, Q_BYTES): what `rotate_queries` made
  float* part_o;    // (units + warps, NT * QCOLS, VD)
  float2* part_ml;  // (units + warps, NT * QCOLS): maximum (log2) and sum
  int batch, heads, group, q_len, passes, num_sinks, warps, fresh, first;  // warps: of the whole grid
  float scaling, softcap;
};
