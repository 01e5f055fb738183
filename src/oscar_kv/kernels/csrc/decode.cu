// Decode attention over packed blocks (pack.py has the layout), sinks and the 16-bit tail, in three launches:
// rotate_queries, decode, combine.
//
// The warps of a persistent grid walk ranges of a flat list of items. An item is a packed block of 128 tokens or a tile
// of 16 exact (16-bit) tokens of one (row, KV head, pass); a pass is 8 * NT columns, and a column is one query of the
// group: column = query * group + head. Keys and values are the A operands (16 x 16 tiles straight from the packed
// words), queries and probabilities the B operands, so scores and outputs are transposed:
//     S^T (tokens, columns) = K Q^T          O^T (channels, columns) = V^T P^T
// Codes are subnormal fp16 numbers: a masked word is code * 2^(pexp - 24). Key scales multiply the query, value scales
// the probabilities, the token norm the score row; centers are one more small product each.
//
// Consecutive items of a range that belong to the same segment (row, head, pass, packed or exact) accumulate in
// registers and leave as one partial (O, maximum, sum) in slot (segment + range), which is unique. `combine` merges a
// segment's partials in a fixed order, rotates the packed part back, and adds the exact part.
//
// Defines: KD VD head dims; KBITS VBITS 2|3|4|8; KGROUP VGROUP; META 0 f16 1 bf16 2 e4m3; BF16 model dtype; NORM 0
// none 1 shared by heads 2 per head; EQUAL ROTK ROTV SOFTCAP 0|1; NT column tiles; QCOLS columns of a tile in use, 1 2 4
// or 8; WARPS per CTA; MERGE warps per column of combine, 1 or 8.

#include "combine.cuh"
#include "softmax.cuh"

// First launch: equalized, rotated queries as B operands (fp16, scaled by a power of two), and for each column tile the
// factor that undoes it, times the softmax scale (base 2). One warp per (row, head, pass); lane (gid, tid) holds
// channels 16 ct + 8 r1 + 2 tid + h of column gid.
extern "C" __global__ void __launch_bounds__(32) rotate_queries(const __grid_constant__ Args a) {
  const int lane = threadIdx.x, gid = lane >> 2, tid = lane & 3, pairs = a.heads * a.passes;
  const int row = blockIdx.x / pairs, pair = blockIdx.x % pairs;
  char* out = a.rotated + (long)blockIdx.x * Q_BYTES;
  allow_launch();
  wait_for_launch();
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    float x[KT][2][2];
    const u16* q = query_of(a, row, pair, 8 * t + gid);
#pragma unroll
    for (int ct = 0; ct < KT; ++ct)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int c = 16 * ct + 8 * r + 2 * tid;
        const u32 w = q ? *(const u32*)(q + c) : 0u;
        x[ct][r][0] = model_to_f32((u16)w);
        x[ct][r][1] = model_to_f32((u16)(w >> 16));
#if EQUAL
        const float2 e = *(const float2*)(a.equalizer + (long)(row * a.heads + pair / a.passes) * KD + c);
        x[ct][r][0] *= e.x;
        x[ct][r][1] *= e.y;
#endif
      }
#if ROTK
    constexpr int BLOCK = KD & -KD;
#pragma unroll
    for (int ct = 0; ct < KT; ++ct)
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // channel bits 0 (h), 1 and 2 (tid)
        float lo = x[ct][r][0] + x[ct][r][1], hi = x[ct][r][0] - x[ct][r][1];
#pragma unroll
        for (int d = 1; d < 4; d <<= 1) {
          const float l2 = __shfl_xor_sync(~0u, lo, d), h2 = __shfl_xor_sync(~0u, hi, d);
          lo = tid & d ? l2 - lo : lo + l2;
          hi = tid & d ? h2 - hi : hi + h2;
        }
        x[ct][r][0] = lo;
        x[ct][r][1] = hi;
      }
#pragma unroll
    for (int ct = 0; ct < KT; ++ct)
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // channel bit 3 (r1)
        const float lo = x[ct][0][h], hi = x[ct][1][h];
        x[ct][0][h] = lo + hi;
        x[ct][1][h] = lo - hi;
      }
#pragma unroll
    for (int d = 1; d < BLOCK / 16; d <<= 1)
#pragma unroll
      for (int ct = 0; ct < KT; ++ct)
        if (!(ct & d))
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float lo = x[ct][i >> 1][i & 1], hi = x[ct + d][i >> 1][i & 1];
            x[ct][i >> 1][i & 1] = lo + hi;
            x[ct + d][i >> 1][i & 1] = lo - hi;
          }
#endif
    float largest = 0.0f;
#pragma unroll
    for (int ct = 0; ct < KT; ++ct)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(x[ct][i >> 1][i & 1]));
#pragma unroll
    for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    // 2^-exponent: the largest query component is in [1, 2)
    const u32 e = __float_as_uint(largest) & 0x7f800000u;
    const float scale = e == 0u || e >= 0x7e800000u ? 1.0f : __uint_as_float(0x7f000000u - e);
#pragma unroll
    for (int ct = 0; ct < KT; ++ct)
      if (gid < QCOLS)
        ((uint2*)out)[(t * KT + ct) * 4 * QCOLS + lane] = make_uint2(pack_f16(x[ct][0][0] * scale, x[ct][0][1] * scale), pack_f16(x[ct][1][0] * scale, x[ct][1][1] * scale));
    const float norm = ROTK ? rsqrtf((float)(KD & -KD)) : 1.0f;
    if (lane == 0) ((float*)(out + Q_FRAGMENTS))[t] = a.scaling * norm * (SOFTCAP ? 1.0f / a.softcap : LOG2E) / scale;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ks = smem_addr(smem) + warp * STAGE, vs = ks + K_STAGE, qs = vs + V_STAGE;
  const u32 bars = smem_addr(smem) + WARPS * STAGE + warp * 16;
  Row* rows = (Row*)(smem + WARPS * (STAGE + 16));
  int* prefix = (int*)(rows + a.batch);
#if PTX_90
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
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
  // packed keys and values are on their way while new tokens are still being stored and queries rotated
  const bool ahead = PTX_90 && cur.packed();
  if (!ahead) wait_for_launch();
  fetch<true>(a, cur, ks, bars, lane, qs, true, ahead);
  fetch<false>(a, cur, vs, bars + 8, lane);
  if (ahead) wait_for_launch();
  allow_launch();
  if (ahead) fetch_queries(a, cur, qs, bars, lane);
  State st;
  st.clear();
  u32 phase = 0;
  while (true) {
    const bool packed = cur.packed();
    Item next = cur;
    if (left > 1) next.advance(a);
    u32 pb[NT][8][2];
    wait(bars, phase, packed);
    if (packed) packed_scores(a, cur, ks, qs, lane, st, pb);
    else exact_scores(a, cur, ks, lane, st, pb);
    __syncwarp();
    if (left > 1) {
#if PTX_90
      if (!packed) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
      fetch<true>(a, next, ks, bars, lane, qs, next.pair != cur.pair || next.row != cur.row || !packed);
    } else commit();
    wait(bars + 8, phase, packed);
    if (packed) packed_values(vs, lane, pb, st);
    else exact_values(vs, lane, pb, st);
    __syncwarp();
    if (packed) phase ^= 1;
    if (left > 1) {
#if PTX_90
      if (!packed) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
      fetch<false>(a, next, vs, bars + 8, lane);
    }
    const int segment = cur.segment(a);
    if (left == 1 || next.segment(a) != segment) {
      store_partial(a, segment + range, packed, lane, st);
      if (left == 1) return;
      st.clear();
    }
    cur = next;
    --left;
  }
}
