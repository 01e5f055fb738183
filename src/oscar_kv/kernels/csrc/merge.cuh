// Merging the partials of a column, and writing its output.
#pragma once
#include "worklist.cuh"

// A warp holds a column; a lane has its channels 128 k + 4 lane + j.
constexpr int SPANS = (VD + 127) / 128;
struct Merged {
  float m, l, o[SPANS][4];
  __device__ __forceinline__ void clear() {
    m = NEG_INF, l = 0.0f;
#pragma unroll
    for (int i = 0; i < SPANS * 4; ++i) o[i >> 2][i & 3] = 0.0f;
  }
};

__device__ __forceinline__ void rescale(Merged& r, float m) {
  const float f = r.m == NEG_INF ? 0.0f : ex2(r.m - m);
  r.m = m;
  r.l *= f;
#pragma unroll
  for (int i = 0; i < SPANS * 4; ++i) r.o[i >> 2][i & 3] *= f;
}
__device__ __forceinline__ void add(Merged& to, Merged other) {
  const float m = fmaxf(to.m, other.m);
  rescale(to, m), rescale(other, m);
  to.l += other.l;
#pragma unroll
  for (int i = 0; i < SPANS * 4; ++i) to.o[i >> 2][i & 3] += other.o[i >> 2][i & 3];
}
__device__ __forceinline__ void merge_parts(const float2* ml, const float4* po, int parts, int first, int step, int lane, Merged& r) {
  constexpr int COLUMNS = NT * QCOLS;
  float top = NEG_INF;
  for (int i = first + step * lane; i < parts; i += step * 32) top = fmaxf(top, ml[(long)i * COLUMNS].x);
#pragma unroll
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  top = fmaxf(top, r.m);
  rescale(r, top);
  const float base = top == NEG_INF ? 0.0f : top;  // only NaN or nothing was seen
#pragma unroll 1
  for (int i = first; i < parts; i += step * 32) {  // parts i, i + step, ...: 32 weights at a time, one per lane
    const int mine = i + step * lane;
    const float2 v = mine < parts ? ml[(long)mine * COLUMNS] : make_float2(NEG_INF, 0.0f);
    const float g = ex2(v.x - base);
    r.l = fmaf(v.y, g, r.l);
    const int count = min(32, (parts - i + step - 1) / step);
#pragma unroll 1
    for (int k0 = 0; k0 < count; k0 += 4) {  // 4 partials under way at a time
      float4 x[4][SPANS];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int s = 0; s < SPANS; ++s)
          x[k][s] = k0 + k < count && (VD % 128 == 0 || 128 * s + 4 * lane < VD) ? po[(long)(i + step * (k0 + k)) * COLUMNS * (VD / 4) + 32 * s + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float w = k0 + k < count ? __shfl_sync(~0u, g, k0 + k) : 0.0f;
#pragma unroll
        for (int s = 0; s < SPANS; ++s) r.o[s][0] = fmaf(x[k][s].x, w, r.o[s][0]), r.o[s][1] = fmaf(x[k][s].y, w, r.o[s][1]), r.o[s][2] = fmaf(x[k][s].z, w, r.o[s][2]), r.o[s][3] = fmaf(x[k][s].w, w, r.o[s][3]);
      }
    }
  }
}
__device__ __forceinline__ void rotate_back(Merged& r, int lane) {
  constexpr int BLOCK = VD & -VD;
#pragma unroll
  for (int s = 0; s < SPANS; ++s) {
#pragma unroll
    for (int d = 1; d < 4; d <<= 1)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!(j & d)) {
          const float lo = r.o[s][j], hi = r.o[s][j + d];
          r.o[s][j] = lo + hi, r.o[s][j + d] = lo - hi;
        }
#pragma unroll
    for (int d = 1; d < min(BLOCK, 128) / 4; d <<= 1)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = __shfl_xor_sync(~0u, r.o[s][j], d);
        r.o[s][j] = lane & d ? x - r.o[s][j] : r.o[s][j] + x;
      }
  }
#pragma unroll
  for (int d = 1; d < BLOCK / 128; d <<= 1)
#pragma unroll
    for (int s = 0; s < SPANS; ++s)
      if (!(s & d))
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float lo = r.o[s][j], hi = r.o[s + d][j];
          r.o[s][j] = lo + hi, r.o[s + d][j] = lo - hi;
        }
#pragma unroll
  for (int i = 0; i < SPANS * 4; ++i) r.o[i >> 2][i & 3] *= rsqrtf((float)BLOCK);
}

// Output of column n (of all passes) of a pair from its merged parts: the packed one rotated back, and the exact one.
__device__ __forceinline__ void finish(const Args& a, int row, int pair, int n, Merged& packed, Merged& exact, int lane) {
  if (ROTV) rotate_back(packed, lane);
  const float m = fmaxf(packed.m, exact.m);
  rescale(packed, m), rescale(exact, m);
  float l = packed.l + exact.l;
#pragma unroll
  for (int d = 16; d; d >>= 1) l += __shfl_xor_sync(~0u, l, d);
  const int head = (pair / a.passes) * a.group + n % a.group;
  if (a.sink_logits) l += ex2(a.sink_logits[head] * LOG2E - m);
  const float inv = l == 0.0f ? 0.0f : 1.0f / l;
  u16* out = a.out + (((long)row * a.q_len + n / a.group) * a.heads * a.group + head) * VD;
#pragma unroll
  for (int s = 0; s < SPANS; ++s)
    if (VD % 128 == 0 || 128 * s + 4 * lane < VD) {
      const float x0 = (packed.o[s][0] + exact.o[s][0]) * inv, x1 = (packed.o[s][1] + exact.o[s][1]) * inv;
      const float x2 = (packed.o[s][2] + exact.o[s][2]) * inv, x3 = (packed.o[s][3] + exact.o[s][3]) * inv;
      *(uint2*)(out + 128 * s + 4 * lane) = make_uint2(pack_model(x0, x1), pack_model(x2, x3));
    }
}
