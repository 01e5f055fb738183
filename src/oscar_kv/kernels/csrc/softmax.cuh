// What a warp does with an item: scores, running softmax, value product, and the partial that it leaves.
#pragma once
#include "worklist.cuh"

// B operand of a channel tile; columns that are not in use repeat those that are
__device__ __forceinline__ uint2 query_fragment(u32 qs, int t, int ct, int lane) {
  return lds64(qs + (lane % (4 * QCOLS)) * 8 + (t * KT + ct) * 32 * QCOLS);
}

__device__ __forceinline__ float cap(const Args& a, float s) {
#if SOFTCAP
  return a.softcap * LOG2E * tanhf(s);
#else
  return s;
#endif
}

// ---- running softmax of a warp ----
struct State {
  float o[NT][VT][4];        // O^T: channels 16 ct + gid (+ 8), columns 2 tid + {0, 1}
  float z[NT][(2 * VG + 15) / 16][4];  // rows: value groups' scales, then their centers, times P
  float m[NT][2], l[NT][2];  // maximum (log2) with the value unit in it; this lane's share of the sum
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
      for (int i = 0; i < VT * 4; ++i) o[t][i >> 2][i & 3] = 0.0f;
#pragma unroll
      for (int i = 0; i < (2 * VG + 15) / 16 * 4; ++i) z[t][i >> 2][i & 3] = 0.0f;
      m[t][0] = m[t][1] = NEG_INF;
      l[t][0] = l[t][1] = 0.0f;
    }
  }
  // Outputs of exact tokens become what packed blocks add to: rotated, in units of their codes
  __device__ __forceinline__ void rotate_exact(int lane) {
    constexpr int BLOCK = VD & -VD;
    const float f = (ROTV ? rsqrtf((float)BLOCK) : 1.0f) / pow2(24 - P_SHIFT);
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#if ROTV
#pragma unroll
      for (int d = 4; d < 32; d <<= 1)  // channel bits 0 to 2 (gid)
#pragma unroll
        for (int i = 0; i < VT * 4; ++i) {
          const float x = __shfl_xor_sync(~0u, o[t][i >> 2][i & 3], d);
          o[t][i >> 2][i & 3] = lane & d ? x - o[t][i >> 2][i & 3] : o[t][i >> 2][i & 3] + x;
        }
#pragma unroll
      for (int d = 2; d < BLOCK / 4; d <<= 1)  // channel bit 3 is bit 1 of i, the others are those of the tile
#pragma unroll
        for (int i = 0; i < VT * 4; ++i)
          if (!(i & d)) {
            const float lo = o[t][i >> 2][i & 3], hi = o[t][(i + d) >> 2][(i + d) & 3];
            o[t][i >> 2][i & 3] = lo + hi, o[t][(i + d) >> 2][(i + d) & 3] = lo - hi;
          }
#endif
#pragma unroll
      for (int i = 0; i < VT * 4; ++i) o[t][i >> 2][i & 3] *= f;
    }
  }
  // Raise the maxima to at least `top` of this lane's rows
  __device__ __forceinline__ void raise(float (&top)[NT][2]) {
    bool grows = false;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c) grows |= top[t][c] > m[t][c];
    if (!__any_sync(~0u, grows)) return;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      float f[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) top[t][c] = fmaxf(top[t][c], __shfl_xor_sync(~0u, top[t][c], d));
        const float next = fmaxf(m[t][c], top[t][c]);
        f[c] = next == NEG_INF ? 1.0f : ex2(m[t][c] - next);
        m[t][c] = next;
        l[t][c] *= f[c];
      }
#pragma unroll
      for (int i = 0; i < VT * 4; ++i) o[t][i >> 2][i & 3] *= f[i & 1];
#pragma unroll
      for (int i = 0; i < (2 * VG + 15) / 16 * 4; ++i) z[t][i >> 2][i & 3] *= f[i & 1];
    }
  }
};

// Scores of a packed block, then probabilities as B operands of the value product
__device__ __forceinline__ void packed_scores(const Args& a, const Item& it, u32 ks, u32 qs, int lane, State& st, u32 (&pb)[NT][8][2]) {
  asm volatile("" : "+r"(lane));  // addresses are worked out anew: registers are scarcer
  const int gid = lane >> 2, tid = lane & 3;
  float s[NT][8][4];
  {  // centers: rows of A are the groups' scales, then their centers, which lie one after the other
    float b[NT][4];
#pragma unroll
    for (int t = 0; t < NT; ++t) b[t][0] = b[t][1] = b[t][2] = b[t][3] = 0.0f;
    const u32 rows = ks + K_SCALE + (min(gid, 2 * KG - 1) * KT * 4 + tid) * 4 * MB;
#pragma unroll
    for (int ct = 0; ct < KT; ++ct) {
      u32 A[4] = {0u, 0u, 0u, 0u};
      const uint2 lo = meta4(rows + ct * 16 * MB);
      A[0] = lo.x, A[2] = lo.y;
      if (KG == 8) {
        const uint2 hi = meta4(rows + (8 * KT + ct) * 16 * MB);
        A[1] = hi.x, A[3] = hi.y;
      }
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const uint2 q = query_fragment(qs, t, ct, lane);
        mma(b[t], A, q.x, q.y);
      }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float center = KG == 8 ? b[t][2 + c] : __shfl_down_sync(~0u, b[t][c], 4 * KG);
        const float bias = center - 0.5f * K_LEVELS * b[t][c];
#pragma unroll
        for (int g = 0; g < KG; ++g) {
          const float of_group = __shfl_sync(~0u, bias, 4 * g + tid);
#pragma unroll
          for (int p = g * (KGROUP / 16); p < (g + 1) * (KGROUP / 16); ++p) s[t][p][c] = s[t][p][c + 2] = of_group * pow2(pexp(KBITS, p) - 24);
        }
      }
  }
  expand_scales<KG * KD>(ks + K_SCALE, lane);
#pragma unroll K_UNROLL
  for (int ct = 0; ct < KT; ++ct) {
    uint2 q[NT];
#pragma unroll
    for (int t = 0; t < NT; ++t) q[t] = query_fragment(qs, t, ct, lane);
#pragma unroll
    for (int set = 0; set < 8 / Words<KBITS>::PER; ++set) {
      Words<KBITS> w;
      w.load(ks, set, ct, KT, lane);
      u32 b[NT][2];
#pragma unroll
      for (int p = set * Words<KBITS>::PER; p < (set + 1) * Words<KBITS>::PER; ++p) {
        if (p % (KGROUP / 16) == 0 || p == set * Words<KBITS>::PER) {
          const uint2 sc = lds64(ks + K_SCALE + tid * 8 + (p / (KGROUP / 16) * KT + ct) * 32);
#pragma unroll
          for (int t = 0; t < NT; ++t) b[t][0] = hmul2(q[t].x, sc.x), b[t][1] = hmul2(q[t].y, sc.y);
        }
        u32 A[4];
        w.fragment(A, p);
#pragma unroll
        for (int t = 0; t < NT; ++t) mma(s[t][p], A, b[t][0], b[t][1]);
      }
    }
  }
  // scores in log2 units: times token norm, unit and the query's factor
  const uint2 units = lds64(ks + K_UNITS);
  const float key_unit = __uint_as_float(units.x);
  float factor[NT];
#pragma unroll
  for (int t = 0; t < NT; ++t) factor[t] = __uint_as_float(lds32(qs + Q_FRAGMENTS + 4 * t)) * key_unit;
  const float unit = (float)((int)(units.y >> 23) - 127);  // value unit as a power of two
#if NORM
  u32 nw[8];
  *(uint4*)&nw[0] = lds128(ks + K_BYTES + gid * 32);
  *(uint4*)&nw[4] = lds128(ks + K_BYTES + gid * 32 + 16);
#endif
  float top[NT][2];
#pragma unroll
  for (int t = 0; t < NT; ++t) top[t][0] = top[t][1] = NEG_INF;
#pragma unroll
  for (int p = 0; p < 8; ++p) {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const float f = factor[t] * pow2(24 - pexp(KBITS, p));
#if NORM
      const float f0 = f * __uint_as_float(nw[p] << 16), f1 = f * __uint_as_float(nw[p] & 0xffff0000u);
#else
      const float f0 = f, f1 = f;
#endif
      s[t][p][0] = cap(a, s[t][p][0] * f0), s[t][p][1] = cap(a, s[t][p][1] * f0);
      s[t][p][2] = cap(a, s[t][p][2] * f1), s[t][p][3] = cap(a, s[t][p][3] * f1);
    }
  }
  if (it.block() == 0 && a.num_sinks) {  // sinks are read from their 16-bit copy
#pragma unroll
    for (int p = 0; p < 8; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (16 * p + gid + 8 * (i >> 1) < a.num_sinks)
#pragma unroll
          for (int t = 0; t < NT; ++t) s[t][p][i] = NEG_INF;
  }
#pragma unroll
  for (int t = 0; t < NT; ++t)
#pragma unroll
    for (int p = 0; p < 8; ++p) top[t][0] = fmaxf(top[t][0], fmaxf(s[t][p][0], s[t][p][2])), top[t][1] = fmaxf(top[t][1], fmaxf(s[t][p][1], s[t][p][3]));
#pragma unroll
  for (int t = 0; t < NT; ++t) top[t][0] += unit, top[t][1] += unit;
  st.raise(top);
  const float undo = ex2(-unit - P_SHIFT);
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    float sum[2] = {0.0f, 0.0f}, offset[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) offset[c] = (st.m[t][c] == NEG_INF ? 0.0f : st.m[t][c]) - unit - P_SHIFT;
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      const int e = pexp(VBITS, p);
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = ex2(s[t][p][i] - (offset[i & 1] + e));
        sum[i & 1] = fmaf(x[i], pow2(e), sum[i & 1]);
      }
      pb[t][p][0] = transpose8x8(pack_f16(x[0], x[1]));
      pb[t][p][1] = transpose8x8(pack_f16(x[2], x[3]));
    }
    st.l[t][0] = fmaf(sum[0], undo, st.l[t][0]);
    st.l[t][1] = fmaf(sum[1], undo, st.l[t][1]);
  }
}

__device__ __forceinline__ void packed_values(u32 vs, int lane, const u32 (&pb)[NT][8][2], State& st) {
  const int gid = lane >> 2, tid = lane & 3;
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    const u32 f = pack_f16(pow2(pexp(VBITS, p) - VE), pow2(pexp(VBITS, p) - VE));
#pragma unroll
    for (int zt = 0; zt < (2 * VG + 15) / 16; ++zt) {
      u32 A[4] = {0u, 0u, 0u, 0u};
      const uint2 lo = meta4(vs + V_SCALE + ((min(16 * zt + gid, 2 * VG - 1) * 8 + p) * 4 + tid) * 4 * MB);
      A[0] = hmul2(lo.x, f), A[2] = hmul2(lo.y, f);
      if (2 * VG > 16 * zt + 8) {
        const uint2 hi = meta4(vs + V_SCALE + ((min(16 * zt + 8 + gid, 2 * VG - 1) * 8 + p) * 4 + tid) * 4 * MB);
        A[1] = hmul2(hi.x, f), A[3] = hmul2(hi.y, f);
      }
#pragma unroll
      for (int t = 0; t < NT; ++t) mma(st.z[t][zt], A, pb[t][p][0], pb[t][p][1]);
    }
  }
  expand_scales<VG * 128>(vs + V_SCALE, lane);
#pragma unroll
  for (int g = 0; g < VG; ++g) {
    u32 b[NT][8][2];
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      const uint2 sc = lds64(vs + V_SCALE + ((g * 8 + p) * 4 + tid) * 8);
#pragma unroll
      for (int t = 0; t < NT; ++t) b[t][p][0] = hmul2(pb[t][p][0], sc.x), b[t][p][1] = hmul2(pb[t][p][1], sc.y);
    }
    constexpr int ABREAST = VGROUP / 16 % 4 == 0 ? 4 : VGROUP / 16 % 2 ? 1 : 2;  // channel tiles side by side: independent chains
#pragma unroll
    for (int ct = g * (VGROUP / 16); ct < (g + 1) * (VGROUP / 16); ct += ABREAST)
#pragma unroll
      for (int set = 0; set < 8 / Words<VBITS>::PER; ++set) {
        Words<VBITS> w[ABREAST];
#pragma unroll
        for (int i = 0; i < ABREAST; ++i) w[i].load(vs, set, ct + i, VT, lane);
#pragma unroll
        for (int p = set * Words<VBITS>::PER; p < (set + 1) * Words<VBITS>::PER; ++p)
#pragma unroll
          for (int i = 0; i < ABREAST; ++i) {
            u32 A[4];
            w[i].fragment(A, p);
#pragma unroll
            for (int t = 0; t < NT; ++t) mma(st.o[t][ct + i], A, b[t][p][0], b[t][p][1]);
          }
      }
  }
}

__device__ __forceinline__ void exact_scores(const Args& a, const Item& it, u32 ks, int lane, State& st, u32 (&pb)[NT][8][2]) {
  const int gid = lane >> 2, tid = lane & 3;
  int first, count;
  const bool sinks = exact_source(a, it, first, count);
  float s[NT][4];
  const u16* q[NT];
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
    q[t] = query_of(a, it.row, it.pair, 8 * t + gid);
  }
#pragma unroll
  for (int ct = 0; ct < KT; ++ct) {
    u32 A[4];
    ldmatrix<false>(A, exact_at<KD>(ks, lane & 15, 2 * ct + (lane >> 4)));
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const u32 b0 = q[t] ? *(const u32*)(q[t] + 16 * ct + 2 * tid) : 0u, b1 = q[t] ? *(const u32*)(q[t] + 16 * ct + 8 + 2 * tid) : 0u;
      mma_model(s[t], A, b0, b1);
    }
  }
  const float f = a.scaling * (SOFTCAP ? 1.0f / a.softcap : LOG2E);
  float top[NT][2];
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    top[t][0] = top[t][1] = NEG_INF;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = gid + 8 * (i >> 1), n = query_of_column(a, it.pair, 8 * t + 2 * tid + (i & 1));
      // query n / group is token (tail - q_len + n / group) of the tail and sees nothing newer
      const bool seen = token < count && (sinks || first + token <= it.tail - a.q_len + n / a.group);
      s[t][i] = seen ? cap(a, s[t][i] * f) : NEG_INF;
      top[t][i & 1] = fmaxf(top[t][i & 1], s[t][i]);
    }
  }
  st.raise(top);
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float m = st.m[t][i & 1];
      x[i] = ex2(s[t][i] - (m == NEG_INF ? 0.0f : m));
      st.l[t][i & 1] += x[i];
    }
    pb[t][0][0] = transpose8x8(pack_model(x[0], x[1]));
    pb[t][0][1] = transpose8x8(pack_model(x[2], x[3]));
  }
}

__device__ __forceinline__ void exact_values(u32 vs, int lane, const u32 (&pb)[NT][8][2], State& st) {
#pragma unroll
  for (int ct = 0; ct < VT; ++ct) {
    u32 A[4];
    ldmatrix<true>(A, exact_at<VD>(vs, (lane & 7) + 8 * (lane >> 4), 2 * ct + ((lane >> 3) & 1)));
#pragma unroll
    for (int t = 0; t < NT; ++t) mma_model(st.o[t][ct], A, pb[t][0][0], pb[t][0][1]);
  }
}

// What a warp has found. part_o: (NT * QCOLS, VD), rotated as values are; part_ml: (NT * QCOLS), maximum (log2) and sum
__device__ __forceinline__ void store_partial(float* part_o, float2* part_ml, int lane, State& st) {
  const int gid = lane >> 2, tid = lane & 3;
#pragma unroll
  for (int t = 0; t < NT; ++t) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) st.l[t][c] += __shfl_xor_sync(~0u, st.l[t][c], d);
#pragma unroll
    for (int g = 0; g < VG; ++g) {
      float center[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int zs = g, zc = VG + g;
        const float vs = __shfl_sync(~0u, st.z[t][zs / 16][(zs / 8 % 2) * 2 + c], 4 * (zs % 8) + tid);
        const float vc = __shfl_sync(~0u, st.z[t][zc / 16][(zc / 8 % 2) * 2 + c], 4 * (zc % 8) + tid);
        center[c] = (vc - 0.5f * V_LEVELS * vs) * (pow2(VE) / pow2(P_SHIFT));
      }
#pragma unroll
      for (int ct = g * (VGROUP / 16); ct < (g + 1) * (VGROUP / 16); ++ct)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col = 2 * tid + (i & 1);
          if (col < QCOLS) part_o[(t * QCOLS + col) * VD + 16 * ct + gid + 8 * (i >> 1)] = fmaf(st.o[t][ct][i], pow2(24 - P_SHIFT), center[i & 1]);
        }
    }
    if (gid == 0)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (2 * tid + c < QCOLS) part_ml[t * QCOLS + 2 * tid + c] = make_float2(st.m[t][c], st.l[t][c]);
  }
}

// One item, whose keys and values are on their way; those of the next one (if `more`) start as soon as there is room.
// `fresh`: with its queries; `last`: of the exact ones that a warp has in a row.
__device__ __forceinline__ void attend_item(
    const Args& a, const Item& cur, const Item& next, bool more, bool fresh, bool last, u32 ks, u32 vs, u32 qs, u32 bars, int lane,
    u32& phase, State& st) {
  const bool packed = cur.packed();
  u32 pb[NT][8][2];
  wait(bars, phase, packed);
  if (packed) packed_scores(a, cur, ks, qs, lane, st, pb);
  else exact_scores(a, cur, ks, lane, st, pb);
  __syncwarp();
  if (more) {
    if (!packed || META != 0) fence_copies();
    fetch<true>(a, next, ks, bars, lane, qs, fresh);
  } else commit();
  wait(bars + 8, phase, packed);
  if (packed) packed_values(vs, lane, pb, st);
  else exact_values(vs, lane, pb, st);
  __syncwarp();
  if (packed) phase ^= 1;
  else if (last) st.rotate_exact(lane);
  if (more) {
    if (!packed || META != 0) fence_copies();
    fetch<false>(a, next, vs, bars + 8, lane);
  }
}
