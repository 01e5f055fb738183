// Number formats and small device helpers. Nothing is included: NVRTC has no headers on a user's machine.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int BLOCK_TOKENS = 128;
constexpr u32 ALL_LANES = 0xffffffffu;

enum { DTYPE_BF16 = 0, DTYPE_F16 = 1, DTYPE_F32 = 2 };  // DTYPE: the model's numbers
enum { META_F16 = 0, META_BF16 = 1, META_E4M3 = 2 };    // META: scales and centers

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }

// min and max that return NaN if either is NaN (fminf and fmaxf return the number)
__device__ __forceinline__ float min_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// 1 / x to 22 bits or so; 0 where that is below 2^-126
__device__ __forceinline__ float coarse_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x of finite x, to the last bit but for rare cases
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y = coarse_reciprocal(x);
    return fmaf(fmaf(-y, x, 1.0f), y, y);
}

__device__ __forceinline__ u32 warp_max(u32 x) {
    u32 y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void prefetch(const void* address) {  // to L2
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ float f16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 float_to_bf16(float x) {  // to nearest even
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fc0 : (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// x as the nearest e4m3 number, by integers: there is no instruction for it before sm_89.
__device__ __forceinline__ u8 float_to_e4m3(float x) {
    float magnitude = fabsf(x);
    u32 sign = __float_as_uint(x) >> 24 & 0x80u, bits = __float_as_uint(magnitude);
    if (x != x) return 0x7f;
    if (magnitude >= 448.0f) return (u8)(0x7e | sign);
    if (magnitude < 0.015625f) return (u8)(__float_as_uint(magnitude + 16384.0f) & 0xf | sign);  // multiples of 2^-9
    return (u8)(((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3) | sign);
}

__device__ __forceinline__ float e4m3_to_float(u8 code) {
    u32 magnitude = code & 0x7fu;
    float x = __uint_as_float(magnitude << 20) * 1.329228e36f;  // 2^120 makes up for the difference of the biases
    if (magnitude == 0x7fu) x = not_a_number();
    return __uint_as_float(__float_as_uint(x) | (u32)(code & 0x80u) << 24);
}

// Store scale and center as element `index` of their arrays, as NaN where they are not finite; returns what was
// stored: (scale, center).
template <int FORMAT>
__device__ __forceinline__ float2 store_metadata(u8* scales, u8* centers, int index, float scale, float center) {
    if (!is_finite(scale)) scale = not_a_number();
    if (!is_finite(center)) center = not_a_number();
    if constexpr (FORMAT == META_E4M3) {
#if __CUDA_ARCH__ >= 890
        u16 pair;
        u32 halves;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(center), "f"(scale));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
        scales[index] = (u8)pair;
        centers[index] = (u8)(pair >> 8);
        return make_float2(f16_to_float((u16)halves), f16_to_float((u16)(halves >> 16)));
#else
        u8 s = scales[index] = float_to_e4m3(scale), c = centers[index] = float_to_e4m3(center);
        return make_float2(e4m3_to_float(s), e4m3_to_float(c));
#endif
    } else {
        u16 s = FORMAT == META_F16 ? float_to_f16(scale) : float_to_bf16(scale);
        u16 c = FORMAT == META_F16 ? float_to_f16(center) : float_to_bf16(center);
        reinterpret_cast<u16*>(scales)[index] = s;
        reinterpret_cast<u16*>(centers)[index] = c;
        if constexpr (FORMAT == META_F16) return make_float2(f16_to_float(s), f16_to_float(c));
        return make_float2(bf16_to_float(s), bf16_to_float(c));
    }
}

// 16 or 8 bytes that are read once: they leave the caches first.
__device__ __forceinline__ uint4 stream16(const u8* from) {
    uint4 x;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ __forceinline__ uint2 stream8(const u8* from) {
    uint2 x;
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}

// 8 consecutive numbers, 16-byte aligned.
template <int TYPE>
__device__ __forceinline__ void load_elements(float* x, const u8* numbers) {
    if constexpr (TYPE == DTYPE_F32) {
        const float4* from = reinterpret_cast<const float4*>(numbers);
        float4 a = from[0], b = from[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        uint4 pairs = *reinterpret_cast<const uint4*>(numbers);
        u32 word[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u16 low = (u16)word[i], high = (u16)(word[i] >> 16);
            x[2 * i] = TYPE == DTYPE_F16 ? f16_to_float(low) : __uint_as_float(word[i] << 16);
            x[2 * i + 1] = TYPE == DTYPE_F16 ? f16_to_float(high) : __uint_as_float(word[i] & 0xffff0000u);
        }
    }
}
