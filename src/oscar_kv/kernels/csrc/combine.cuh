// The last launch: merge the partials of each (row, head, pass) and column in use. MERGE warps share those of a column.
#pragma once
#include "merge.cuh"

constexpr int COMBINE_WARPS = MERGE < 8 ? 8 : MERGE;

extern "C" __global__ void __launch_bounds__(COMBINE_WARPS * 32) combine(const __grid_constant__ Args a) {
  __shared__ Merged shared[MERGE][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int pairs = a.heads * a.passes, task = blockIdx.x * (COMBINE_WARPS / MERGE) + warp / MERGE;
  const int unit = task / COLUMNS, kept = task % COLUMNS;
  const int row = unit / pairs, pair = unit % pairs, n = query_of_kept(a, pair, kept);
  const bool used = row < a.batch && n < a.group * a.q_len;
  // where the partials are depends on the lengths alone, and is worked out while `decode` still runs
  const int2 before = items_before(a, row, lane);
  const int items = used ? Row::of(a, row).items(a) : 0, start = before.x * pairs + pair * items;
  const Split split(before.y * pairs, a.warps);
  const int first = items ? split.range_of(start) : 0, parts = items ? split.range_of(start + items - 1) - first + 1 : 0;
  wait_for_launch();
  Merged all;
  const long slot = (long)(unit + first) * COLUMNS + kept;
  merge_parts(a.part_ml + slot, (const float4*)(a.part_o + slot * VD), COLUMNS * (VD / 4), parts, warp % MERGE, MERGE, lane, all);
  if (MERGE > 1) {
    shared[warp][lane] = all;
    __syncthreads();
    if (warp) return;
    merge_all(&shared[0][lane], MERGE, 32, all);
  }
  if (used) finish(a, row, pair, n, all, lane);
}
