// Decode attention over packed blocks (pack.py has the layout), sinks and the 16-bit tail, in three launches:
// rotate_queries, decode, combine.
//
// The warps of a persistent grid walk ranges of a flat list of items. An item is a packed block of 128 tokens or a tile
// of 16 exact (16-bit) tokens of one (row, KV head, pass), a unit; a pass is 8 * NT columns, and a column is one query of
// the group: column = query * group + head. Keys and values are the A operands (16 x 16 tiles straight from the packed
// words), queries and probabilities the B operands, so scores and outputs are transposed:
//     S^T (tokens, columns) = K Q^T          O^T (channels, columns) = V^T P^T
// Codes are subnormal fp16 numbers: a masked word is code * 2^(pexp - 24). Key scales multiply the query, value scales
// the probabilities, the token norm the score row; centers are one more small product each.
//
// Consecutive items of a range that belong to the same unit accumulate in registers and leave as one partial (O, maximum,
// sum) in slot (unit + range), which is unique. Exact items of a unit come first: what they add up to is rotated as packed
// values are, and goes on from there. `combine` merges a unit's partials in a fixed order and rotates the sum back.
//
// Defines: KD VD head dims; KBITS VBITS 2|3|4|8; KGROUP VGROUP; META 0 f16 1 bf16 2 e4m3; BF16 model dtype; NORM 0
// none 1 shared by heads 2 per head; EQUAL ROTK ROTV SOFTCAP 0|1; NT column tiles; QCOLS columns of a tile in use, 1 2 4
// or 8; WARPS per CTA; MERGE warps per column of combine, 1, 8 or 32.

#include "combine.cuh"
#include "queries.cuh"
#include "softmax.cuh"

// First launch, one warp per (row, head, pass).
extern "C" __global__ void __launch_bounds__(32) rotate_queries(const __grid_constant__ Args a) {
  const int pairs = a.heads * a.passes, row = blockIdx.x / pairs, pair = blockIdx.x % pairs;
  allow_launch();
  Equalizer equalizer;
  equalizer.load(a, row, pair, threadIdx.x);
  wait_for_launch();
  rotate_queries_of(a, row, pair, equalizer, a.rotated + (long)blockIdx.x * Q_BYTES, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ks = smem_addr(smem) + warp * STAGE, vs = ks + K_STAGE, qs = vs + V_STAGE;
  const u32 bars = smem_addr(smem) + WARPS * STAGE + warp * 16;
  Row* rows = (Row*)(smem + WARPS * (STAGE + 16));
  int* prefix = (int*)(rows + a.batch);
  init_barriers(bars, lane);
  for (int r = threadIdx.x; r < a.batch; r += WARPS * 32) rows[r] = Row::of(a, r);
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int r = lane; r < (a.batch + 31) / 32 * 32; r += 32) {
      int sum = r < a.batch ? rows[r].items(a) : 0;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int up = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += up;
      }
      if (r < a.batch) prefix[r + 1] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) prefix[0] = 0;
  }
  __syncthreads();
  const Split split(prefix[a.batch] * a.heads * a.passes, a.warps);
  const int range = warp * gridDim.x + blockIdx.x;
  int left = split.count(range);
  if (left == 0) return;
  Item cur;
  cur.rows = rows;
  locate(a, prefix, split.start(range), cur);
  // packed keys are on their way while new tokens are still being stored and queries rotated
  const bool ahead = PTX_90 && cur.packed();
  if (!ahead) wait_for_launch();
  fetch<true>(a, cur, ks, bars, lane, qs, true, ahead);
  if (ahead) wait_for_launch();
  allow_launch();
  if (ahead) {
    fetch_queries(a, cur, qs, bars, lane);
    wait(bars, 0, true);  // values take their turn after everyone's first keys
  }
  fetch<false>(a, cur, vs, bars + 8, lane);
  State st;
  st.clear();
  u32 phase = 0;
  while (true) {
    Item next = cur;
    if (left > 1) next.advance(a);
    const bool fresh = next.pair != cur.pair || next.row != cur.row || !cur.packed();
    const int unit = cur.unit(a);
    const bool ends = left == 1 || next.unit(a) != unit;
    attend_item(a, cur, next, left > 1, fresh, ends || next.packed(), ks, vs, qs, bars, lane, phase, st);
    if (ends) {
      const long slot = (long)(unit + range) * (NT * QCOLS);
      store_partial(a.part_o + slot * VD, a.part_ml + slot, lane, st);
      if (left == 1) return;
      st.clear();
    }
    cur = next;
    --left;
  }
}
