// Queries of a pass as the operands of the score product.
#pragma once
#include "worklist.cuh"

// What a lane's channels 16 ct + 8 r1 + 2 tid + h of a query are multiplied by. It is loaded as early as packed keys are:
// who has packed blocks has had it since the first, and who has none does not need it.
struct Equalizer {
#if EQUAL
  float2 e[KT][2];
#endif
  __device__ __forceinline__ void load(const Args& a, int row, int pair, int lane) {
#if EQUAL
    const float* from = a.equalizer + (long)(row * a.heads + pair / a.passes) * KD + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 2 * KT; ++i) e[i >> 1][i & 1] = *(const float2*)(from + 8 * i);
#endif
  }
  __device__ __forceinline__ void apply(float (&x)[KT][2][2]) const {
#if EQUAL
#pragma unroll
    for (int i = 0; i < 2 * KT; ++i) x[i >> 1][i & 1][0] *= e[i >> 1][i & 1].x, x[i >> 1][i & 1][1] *= e[i >> 1][i & 1].y;
#endif
  }
};

// Equalized, rotated queries as B operands (fp16, scaled by a power of two), and for each column tile the factor that
// undoes it, times the softmax scale (base 2). A warp does it; lane (gid, tid) holds channels 16 ct + 8 r1 + 2 tid + h
// of column gid. `out` (Q_BYTES) may be in global or shared memory.
__device__ __forceinline__ void rotate_queries_of(const Args& a, int row, int pair, const Equalizer& equalizer, char* out, int lane) {
  const int gid = lane >> 2, tid = lane & 3;
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
      }
    equalizer.apply(x);
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
