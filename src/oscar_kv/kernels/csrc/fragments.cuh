// Tensor-core instructions, and packed words and metadata as their operands.
#pragma once
#include "decode_args.cuh"

// ---- small PTX ----
__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 pack_f16(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ u32 pack_model(float lo, float hi) { return BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi); }
__device__ __forceinline__ float f16_to_f32(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ float model_to_f32(u16 h) { return BF16 ? __uint_as_float((u32)h << 16) : f16_to_f32(h); }
__device__ __forceinline__ u32 transpose8x8(u32 a) { u32 d; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); return d; }
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_model(float* c, const u32* a, u32 b0, u32 b1) {
#if BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma(c, a, b0, b1);
#endif
}
__device__ __forceinline__ uint4 lds128(u32 a) { uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v; }
__device__ __forceinline__ uint2 lds64(u32 a) { uint2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a)); return v; }
__device__ __forceinline__ u32 lds32(u32 a) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
__device__ __forceinline__ void sts128(u32 a, uint4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
template <bool TRANS>
__device__ __forceinline__ void ldmatrix(u32* a, u32 addr) {
  if (TRANS) asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(addr));
  else asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(addr));
}
// 16 bytes to shared memory; zeros where bytes == 0
__device__ __forceinline__ void cp_async16(u32 dst, const void* src, int bytes) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)); }

// Two fp16 pairs from 4 stored scales or centers at byte address a: channels or tokens (r1 = 0: x, r1 = 1: y)
__device__ __forceinline__ uint2 meta4(u32 a) {
#if META == 0
  return lds64(a);
#elif META == 1
  uint2 v = lds64(a);
  v.x = pack_f16(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u));
  v.y = pack_f16(__uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
  return v;
#else
  u32 w = lds32(a);
  uint2 v;
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi;}" : "=r"(v.x), "=r"(v.y) : "r"(w));
#else  // move exponent and mantissa under fp16's, then scale by 2^8 for the difference of biases; e4m3 NaN stays NaN
  u32 x = __byte_perm(w, 0, 0x1404), y = __byte_perm(w, 0, 0x3424);
  v.x = hmul2((x & 0x80008000u) | ((x & 0x7f007f00u) >> 1), 0x5c005c00u);
  v.y = hmul2((y & 0x80008000u) | ((y & 0x7f007f00u) >> 1), 0x5c005c00u);
  if ((x & 0x7f00u) == 0x7f00u) v.x |= 0x7e00u;
  if ((x & 0x7f000000u) == 0x7f000000u) v.x |= 0x7e000000u;
  if ((y & 0x7f00u) == 0x7f00u) v.y |= 0x7e00u;
  if ((y & 0x7f000000u) == 0x7f000000u) v.y |= 0x7e000000u;
#endif
  return v;
#endif
}

// N scales as fp16, where they and the N centers behind them were: the centers have been read. With fp16 they stay.
template <int N>
__device__ __forceinline__ void expand_scales(u32 a, int lane) {
#if META != 0
  constexpr int EIGHTS = N / 8, STEPS = (EIGHTS + 31) / 32;
  uint2 lo[STEPS], hi[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const u32 from = a + min(32 * i + lane, EIGHTS - 1) * 8 * MB;
    lo[i] = meta4(from), hi[i] = meta4(from + 4 * MB);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    if (32 * i + lane < EIGHTS) sts128(a + (32 * i + lane) * 16, make_uint4(lo[i].x, lo[i].y, hi[i].x, hi[i].y));
  __syncwarp();
#endif
}

// ---- packed words -> A fragments ----
// Words of one lane and channel tile that hold token tile p (and its neighbours in the same words)
template <int BITS>
struct Words {
  uint4 w;
  uint2 x;  // 1-bit plane of 3-bit codes
  static constexpr int PER = BITS == 4 ? 4 : BITS == 8 ? 2 : 8;  // token tiles per word
  __device__ __forceinline__ void load(u32 base, int set, int tile, int tiles, int lane) {
    w = lds128(base + lane * 16 + (set * tiles + tile) * 512);
    if (BITS == 3) x = lds64(base + lane * 8 + (2 * tiles + tile) * 256);
  }
  __device__ __forceinline__ void fragment(u32* a, int p) const {
    const u32 r[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (BITS == 8) a[i] = (p & 1 ? r[i] >> 8 : r[i]) & 0x00ff00ffu;
      else if (BITS == 4) a[i] = ((p & 2) ? r[i] >> 8 : r[i]) & (0x000f000fu << (4 * (p & 1)));
      else {
        const int s = 2 * (p < 5 ? p : p - 5);
        a[i] = (p < 5 ? r[i] : r[i] >> 10) & (0x00030003u << s);
        if (BITS == 3) {  // bit 2 p + (i & 1) of the plane belongs at bit s + 2; bit 10 is the exponent's, still linear
          const u32 plane = i < 2 ? x.x : x.y;
          a[i] |= (p < 5 ? plane << (2 - (i & 1)) : plane >> (8 + (i & 1))) & (0x00040004u << s);
        }
      }
    }
  }
};
