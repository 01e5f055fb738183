// Merging the partials of a column, and writing its output.
#pragma once
#include "worklist.cuh"

// A warp holds a column; a lane has its channels 128 k + 4 lane + j.
constexpr int SPANS = (VD + 127) / 128, COLUMNS = NT * QCOLS;
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
// Several, which lie `pitch` apart
__device__ __forceinline__ void merge_all(const Merged* parts, int count, int pitch, Merged& r) {
  r.clear();
  for (int i = 0; i < count; ++i) r.m = fmaxf(r.m, parts[i * pitch].m);
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    Merged part = parts[i * pitch];
    rescale(part, r.m);
    r.l += part.l;
#pragma unroll
    for (int j = 0; j < SPANS * 4; ++j) r.o[j >> 2][j & 3] += part.o[j >> 2][j & 3];
  }
}
// Partials first, first + step, ... of a column, which lie `pitch` float4 apart
__device__ __forceinline__ void merge_parts(const float2* ml, const float4* po, long pitch, int parts, int first, int step, int lane, Merged& r) {
  constexpr int AHEAD = SPANS == 1 ? 8 : 4;  // under way at a time
  r.clear();
#pragma unroll 1
  for (int i = first; i < parts; i += step * AHEAD) {
    const int mine = i + step * lane;  // whose maximum and sum this lane takes
    const float2 v = lane < AHEAD && mine < parts ? ml[(long)mine * COLUMNS] : make_float2(NEG_INF, 0.0f);
    float4 x[AHEAD][SPANS];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
#pragma unroll
      for (int s = 0; s < SPANS; ++s)
        x[k][s] = i + step * k < parts && (VD % 128 == 0 || 128 * s + 4 * lane < VD) ? po[(i + step * k) * pitch + 32 * s + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float top = v.x;
#pragma unroll
    for (int d = AHEAD / 2; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    rescale(r, fmaxf(r.m, __shfl_sync(~0u, top, 0)));
    const float g = ex2(v.x - (r.m == NEG_INF ? 0.0f : r.m));  // only NaN or nothing was seen
    r.l = fmaf(v.y, g, r.l);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const float w = __shfl_sync(~0u, g, k);
#pragma unroll
      for (int s = 0; s < SPANS; ++s) r.o[s][0] = fmaf(x[k][s].x, w, r.o[s][0]), r.o[s][1] = fmaf(x[k][s].y, w, r.o[s][1]), r.o[s][2] = fmaf(x[k][s].z, w, r.o[s][2]), r.o[s][3] = fmaf(x[k][s].w, w, r.o[s][3]);
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

// Output of query n of a pair from its merged partials
__device__ __forceinline__ void finish(const Args& a, int row, int pair, int n, Merged& all, int lane) {
  if (ROTV) rotate_back(all, lane);
  float l = all.l;
#pragma unroll
  for (int d = 16; d; d >>= 1) l += __shfl_xor_sync(~0u, l, d);
  const int head = (pair / a.passes) * a.group + n % a.group;
  if (a.sink_logits) l += ex2(a.sink_logits[head] * LOG2E - all.m);
  const float inv = l == 0.0f ? 0.0f : 1.0f / l;
  u16* out = a.out + (((long)row * a.q_len + n / a.group) * a.heads * a.group + head) * VD;
#pragma unroll
  for (int s = 0; s < SPANS; ++s)
    if (VD % 128 == 0 || 128 * s + 4 * lane < VD) {
      const float* x = all.o[s];
      *(uint2*)(out + 128 * s + 4 * lane) = make_uint2(pack_model(x[0] * inv, x[1] * inv), pack_model(x[2] * inv, x[3] * inv));
    }
}
