// Decode attention in one launch, where no row has very many items: a cluster of CLUSTER CTAs attends to all items of a
// (row, KV head, pass). Its warps take them in turn and merge what they have found, in each CTA through shared memory,
// then among the CTAs. See decode.cu for the method and the defines; CTAS is how many CTAs share a multiprocessor.

#include "merge.cuh"
#include "queries.cuh"
#include "softmax.cuh"

constexpr int TEAM = CLUSTER * WARPS;         // warps that share a unit
constexpr int PART_O = COLUMNS * VD * 4;      // bytes of a partial's outputs, which lie where the warp's records lay
constexpr int RECORD = K_STAGE + V_STAGE;      // queries are shared by all warps
constexpr int RECORD_STAGE = ((RECORD > PART_O ? RECORD : PART_O) + 127) / 128 * 128;
constexpr int OWN = (COLUMNS + CLUSTER - 1) / CLUSTER;  // columns that a CTA merges for the cluster

// Exact items are dealt to the team's last warp first, packed ones to its first, so that nobody has two more than another.
__device__ __forceinline__ void next_of_team(Item& it, int member) {
  const bool exact = !it.packed();
  it.index += TEAM;
  if (exact && it.packed()) it.index = it.exact() + member;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) decode_short(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  char* queries = smem + WARPS * RECORD_STAGE;
  float2* part_ml = (float2*)(queries + (Q_BYTES + 127) / 128 * 128);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const u32 ks = smem_addr(smem) + warp * RECORD_STAGE, vs = ks + K_STAGE, qs = smem_addr(queries);
  Merged(*joint)[OWN][32] = (Merged(*)[OWN][32])(part_ml + WARPS * COLUMNS);  // what each CTA has of own columns
  const u32 bars = smem_addr(CLUSTER > 1 ? (char*)(joint + CLUSTER) : (char*)joint) + warp * 16;
  init_barriers(bars, lane);
  __syncwarp();
  if (CLUSTER > 1) cluster_arrive();  // the others may write here once this CTA runs
  const int unit = blockIdx.x / CLUSTER, pairs = a.heads * a.passes, row = unit / pairs, member = rank + CLUSTER * warp;
  const Row lengths = Row::of(a, row);
  Item cur;
  cur.row = row, cur.pair = unit % pairs;
  cur.blocks = lengths.blocks, cur.tail = lengths.tail, cur.n = lengths.items(a);
  cur.index = TEAM - 1 - member;
  if (cur.packed()) cur.index = cur.exact() + member;
  cur.load_pair(a);
  // packed keys and values are on their way while new tokens are still being stored and queries rotated
  const bool ahead = PTX_90 && cur.packed(), some = cur.index < cur.n;
  Equalizer equalizer;
  if (warp == WARPS - 1) equalizer.load(a, row, cur.pair, lane);
  if (!ahead) wait_for_launch();
  if (some) {
    fetch<true>(a, cur, ks, bars, lane);
    fetch<false>(a, cur, vs, bars + 8, lane);
  }
  if (ahead) wait_for_launch();
  allow_launch();
  if (warp == WARPS - 1) rotate_queries_of(a, row, cur.pair, equalizer, queries, lane);
  __syncthreads();
  State st;
  st.clear();
  u32 phase = 0;
  while (cur.index < cur.n) {
    Item next = cur;
    next_of_team(next, member);
    const bool more = next.index < cur.n;
    attend_item(a, cur, next, more, false, !more || next.packed(), ks, vs, qs, bars, lane, phase, st);
    cur = next;
  }
  store_partial((float*)(smem + warp * RECORD_STAGE), part_ml + warp * COLUMNS, lane, st);
  __syncthreads();
  if (CLUSTER > 1) cluster_wait();
#pragma unroll 1
  for (int column = warp; column < COLUMNS; column += WARPS) {
    const int n = query_of_kept(a, cur.pair, column);
    if (n >= a.group * a.q_len) continue;
    Merged all;
    merge_parts(part_ml + column, (const float4*)(smem + column * VD * 4), RECORD_STAGE / 16, WARPS, 0, 1, lane, all);
    if (CLUSTER > 1) *of_rank(&joint[rank][column / CLUSTER][lane], column % CLUSTER) = all;
    else finish(a, row, cur.pair, n, all, lane);
  }
  if (CLUSTER == 1) return;
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int own = warp; own < OWN; own += WARPS) {
    const int column = rank + CLUSTER * own, n = query_of_kept(a, cur.pair, column);
    if (column >= COLUMNS || n >= a.group * a.q_len) continue;
    Merged all;
    merge_all(&joint[0][own][lane], CLUSTER, OWN * 32, all);
    finish(a, row, cur.pair, n, all, lane);
  }
}
