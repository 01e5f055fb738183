// The last launch: merge the partials of each (row, head, pass) and column in use. MERGE warps share those of a column.
#pragma once
#include "merge.cuh"

// Add up what the warps of a column found; warp 0 has the sum.
__device__ __forceinline__ void add_warps(Merged (*shared)[32], Merged& part, int warp, int lane) {
  shared[warp][lane] = part;
  __syncthreads();
  if (warp == 0)
#pragma unroll 1
    for (int w = 1; w < MERGE; ++w) add(part, shared[w][lane]);
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Args a) {
  constexpr int COLUMNS = NT * QCOLS;
  __shared__ Merged shared[MERGE][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int pairs = a.heads * a.passes, task = blockIdx.x * (8 / MERGE) + warp / MERGE;
  const int unit = task / COLUMNS, tile_col = task % COLUMNS;
  const int row = unit / pairs, pair = unit % pairs, n = (pair % a.passes) * COLS + tile_col / QCOLS * 8 + tile_col % QCOLS;
  const bool used = row < a.batch && n < a.group * a.q_len;
  // where the partials are depends on the lengths alone, and is worked out while `decode` still runs
  const int2 items = items_before(a, row, lane);
  const Split split(items.y * pairs, a.warps);
  const Row it = used ? Row::of(a, row) : Row{0, 0};
  const int start = items.x * pairs + pair * it.items(a);
  int slot[2], parts[2];  // packed, exact
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const int lo = start + (kind ? it.blocks : 0), hi = start + (kind ? it.items(a) : it.blocks);
    slot[kind] = parts[kind] = 0;
    if (lo == hi) continue;
    const int first = split.range_of(lo);
    slot[kind] = 2 * unit + kind + first;
    parts[kind] = split.range_of(hi - 1) - first + 1;
  }
  wait_for_launch();
  Merged found[2];
#pragma unroll 1
  for (int kind = 0; kind < 2; ++kind) {
    Merged part;
    part.clear();
    const long s = (long)slot[kind] * COLUMNS + tile_col;
    if (parts[kind]) merge_parts(a.part_ml + s, (const float4*)(a.part_o + s * VD), parts[kind], warp % MERGE, MERGE, lane, part);
    if (MERGE > 1) add_warps(shared, part, warp, lane);
    if (kind) found[1] = part;
    else found[0] = part;
  }
  if (used && warp % MERGE == 0) finish(a, row, pair, n, found[0], found[1], lane);
}
