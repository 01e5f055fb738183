// Decode attention where rows are short: one CTA per (row, KV head, pass) does it all in one launch. Its warps take the
// items in turn, and merge what they have found through shared memory. See decode.cu for the method and the defines;
// CTAS is how many CTAs share a multiprocessor.

#include "merge.cuh"
#include "queries.cuh"
#include "softmax.cuh"

constexpr int COLUMNS = NT * QCOLS;
constexpr int RECORD_STAGE = (K_STAGE + V_STAGE + 127) / 128 * 128;  // queries are shared by all warps
constexpr int PART_O = 2 * WARPS * COLUMNS * VD * 4, PART_ML = 2 * WARPS * COLUMNS * 8;  // bytes

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) decode_short(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  char* queries = smem + WARPS * RECORD_STAGE;
  float* part_o = (float*)(queries + (Q_BYTES + 127) / 128 * 128);
  float2* part_ml = (float2*)((char*)part_o + PART_O);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pairs = a.heads * a.passes;
  const u32 ks = smem_addr(smem) + warp * RECORD_STAGE, vs = ks + K_STAGE, qs = smem_addr(queries);
  const u32 bars = smem_addr((char*)part_ml + PART_ML) + warp * 16;
  init_barriers(bars, lane);
  __syncwarp();
  const int row = blockIdx.x / pairs;
  const Row lengths = Row::of(a, row);
  Item cur;
  cur.row = row, cur.pair = blockIdx.x % pairs, cur.index = warp;
  cur.blocks = lengths.blocks, cur.tail = lengths.tail, cur.n = lengths.items(a);
  cur.load_pair(a);
  // packed keys and values are on their way while new tokens are still being stored and queries rotated
  const bool ahead = PTX_90 && cur.packed(), some = cur.index < cur.n;
  if (!ahead) wait_for_launch();
  if (some) {
    fetch<true>(a, cur, ks, bars, lane);
    fetch<false>(a, cur, vs, bars + 8, lane);
  }
  if (ahead) wait_for_launch();
  allow_launch();
  if (warp == WARPS - 1) rotate_queries_of(a, row, cur.pair, queries, lane);
  __syncthreads();
  State st;
  st.clear();
  u32 phase = 0;
  while (cur.index < cur.n) {
    Item next = cur;
    next.index += WARPS;
    const bool more = next.index < cur.n, packed = cur.packed();
    attend_item(a, cur, next, more, false, ks, vs, qs, bars, lane, phase, st);
    if (!more || next.packed() != packed) {
      // the first items of a kind go to slots 0, 1, ...: those of packed items start at warp 0
      const int slot = packed ? warp : WARPS + (cur.index - cur.blocks) % WARPS;
      store_partial(part_o, part_ml, slot, packed, lane, st);
      st.clear();
    }
    cur = next;
  }
  __syncthreads();
#pragma unroll 1
  for (int column = warp; column < COLUMNS; column += WARPS) {
    const int n = (cur.pair % a.passes) * COLS + column / QCOLS * 8 + column % QCOLS;
    if (n >= a.group * a.q_len) continue;
    Merged parts[2];
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
      Merged part;
      part.clear();
      const int count = min(WARPS, kind ? cur.n - cur.blocks : cur.blocks), first = kind * WARPS * COLUMNS + column;
      merge_parts(part_ml + first, (const float4*)(part_o + (long)first * VD), count, 0, 1, lane, part);
      if (kind) parts[1] = part;
      else parts[0] = part;
    }
    finish(a, row, cur.pair, n, parts[0], parts[1], lane);
  }
}
