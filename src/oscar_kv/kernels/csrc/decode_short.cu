// Decode attention in one launch, where no row has very many items: a cluster of CLUSTER CTAs attends to all items of a
// (row, KV head, pass). Its warps take them in turn and merge what they have found, in each CTA through shared memory,
// then among the CTAs. See decode.cu for the method and the defines; CTAS is how many CTAs share a multiprocessor.

#include "merge.cuh"
#include "queries.cuh"
#include "softmax.cuh"

constexpr int COLUMNS = NT * QCOLS, TEAM = CLUSTER * WARPS;  // warps that share a unit
constexpr int RECORD_STAGE = (K_STAGE + V_STAGE + 127) / 128 * 128;  // queries are shared by all warps
constexpr int PART_O = 2 * WARPS * COLUMNS * VD * 4, PART_ML = 2 * WARPS * COLUMNS * 8;  // bytes
constexpr int STAGES = WARPS * RECORD_STAGE;
constexpr int OWN = (COLUMNS + CLUSTER - 1) / CLUSTER;  // columns that a CTA merges for the cluster

__device__ __forceinline__ int participants(int items, int first) {  // of first, first + CLUSTER, ...
  return min(WARPS, max(0, items - first + CLUSTER - 1) / CLUSTER);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) decode_short(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  char* queries = smem + STAGES;
  float* part_o = (float*)(queries + (Q_BYTES + 127) / 128 * 128);
  float2* part_ml = (float2*)((char*)part_o + PART_O);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const u32 ks = smem_addr(smem) + warp * RECORD_STAGE, vs = ks + K_STAGE, qs = smem_addr(queries);
  Merged(*joint)[2][OWN][32] = (Merged(*)[2][OWN][32])((char*)part_ml + PART_ML);  // what each CTA has of own columns
  const u32 bars = smem_addr(CLUSTER > 1 ? (char*)(joint + CLUSTER) : (char*)joint) + warp * 16;
  init_barriers(bars, lane);
  __syncwarp();
  if (CLUSTER > 1) cluster_arrive();  // the others may write here once this CTA runs
  const int unit = blockIdx.x / CLUSTER, pairs = a.heads * a.passes, row = unit / pairs;
  const Row lengths = Row::of(a, row);
  Item cur;
  cur.row = row, cur.pair = unit % pairs, cur.index = rank + CLUSTER * warp;
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
    next.index += TEAM;
    const bool more = next.index < cur.n, packed = cur.packed();
    attend_item(a, cur, next, more, false, ks, vs, qs, bars, lane, phase, st);
    if (!more || next.packed() != packed) {  // slots of a kind are in the order of its first items
      const int slot = packed ? warp : WARPS + (cur.index - cur.blocks) % TEAM / CLUSTER;
      store_partial(part_o, part_ml, slot, packed, lane, st);
      st.clear();
    }
    cur = next;
  }
  __syncthreads();
  const int first_exact = ((rank - cur.blocks) % CLUSTER + CLUSTER) % CLUSTER;
  const int counts[2] = {participants(cur.blocks, rank), participants(cur.n - cur.blocks, first_exact)};
  if (CLUSTER > 1) cluster_wait();
#pragma unroll 1
  for (int column = warp; column < COLUMNS; column += WARPS) {
    const int n = (cur.pair % a.passes) * COLS + column / QCOLS * 8 + column % QCOLS;
    if (n >= a.group * a.q_len) continue;
    Merged found[2];
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
      Merged part;
      part.clear();
      const int first = kind * WARPS * COLUMNS + column;
      merge_parts(part_ml + first, (const float4*)(part_o + (long)first * VD), counts[kind], 0, 1, lane, part);
      if (CLUSTER > 1) *of_rank(&joint[rank][kind][column / CLUSTER][lane], column % CLUSTER) = part;
      else if (kind) found[1] = part;
      else found[0] = part;
    }
    if (CLUSTER == 1) finish(a, row, cur.pair, n, found[0], found[1], lane);
  }
  if (CLUSTER == 1) return;
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int own = warp; own < OWN; own += WARPS) {
    const int column = rank + CLUSTER * own;
    const int n = (cur.pair % a.passes) * COLS + column / QCOLS * 8 + column % QCOLS;
    if (column >= COLUMNS || n >= a.group * a.q_len) continue;
    Merged found[2];
    found[0].clear(), found[1].clear();
#pragma unroll 2
    for (int other = 0; other < CLUSTER; ++other)
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) add(found[kind], joint[other][kind][own][lane]);
    finish(a, row, cur.pair, n, found[0], found[1], lane);
  }
}
