// Decode attention over packed blocks (pack.py has the layout), sinks and the 16-bit tail, in one launch + combine.
//
// The warps of a persistent grid walk ranges of a flat list of items. An item is a packed block of 128 tokens or a tile
// of 16 exact (16-bit) tokens of one (row, KV head, pass); a pass is 8 * NT columns, and a column is one query of the
// group: column = query * group + head. Keys and values are the A operands (16 x 16 tiles straight
// from the packed words), queries and probabilities the B operands, so scores and outputs are transposed:
//     S^T (tokens, columns) = K Q^T          O^T (channels, columns) = V^T P^T
// Codes are subnormal fp16 numbers: a masked word is code * 2^(pexp - 24). Key scales multiply the query, value scales
// the probabilities, the token norm the score row; centers are one more small product each (docs/kernels.md).
//
// Consecutive items of a range that belong to the same segment (row, head, pass, packed or exact) accumulate in
// registers and leave as one partial (O, maximum, sum) in slot (segment + range), which is unique. `combine` merges a
// segment's partials in a fixed order, rotates the packed part back, and adds the exact part.
//
// Defines: KD VD head dims; KBITS VBITS 2|3|4|8; KGROUP VGROUP; META 0 f16 1 bf16 2 e4m3; BF16 model dtype; NORM 0
// none 1 shared by heads 2 per head; EQUAL ROTK ROTV SOFTCAP 0|1; NT column tiles; QCOLS columns of a tile in use, 1 2 4
// or 8; WARPS per CTA; MERGE warps per column of combine, 1 or 8.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PTX_90 true  // bulk copies, mbarriers, dependent launches
#else
#define PTX_90 false
#endif

constexpr int KT = KD / 16, VT = VD / 16;           // channel tiles
constexpr int KG = 128 / KGROUP, VG = VD / VGROUP;  // groups of a block
constexpr int MB = META == 2 ? 1 : 2;               // bytes of a scale or center
constexpr int COLS = 8 * NT;
constexpr int K_CODES = 16 * KD * KBITS, V_CODES = 16 * VD * VBITS;
constexpr int K_SCALE = K_CODES, K_UNITS = K_SCALE + 2 * KG * KD * MB, K_BYTES = K_UNITS + 16;
constexpr int V_SCALE = V_CODES, V_BYTES = V_SCALE + 2 * VG * 128 * MB;
constexpr int NORM_BYTES = NORM ? 256 : 0;
constexpr int K_STAGE = K_BYTES + NORM_BYTES, V_STAGE = V_BYTES;
constexpr int Q_FRAGMENTS = NT * KT * 32 * QCOLS, Q_BYTES = Q_FRAGMENTS + 16;  // and NT factors
constexpr int STAGE = (K_STAGE + V_STAGE + Q_BYTES + 127) / 128 * 128;  // shared memory of a warp
constexpr float K_LEVELS = (1 << KBITS) - 1, V_LEVELS = (1 << VBITS) - 1;
// P enters the value product times 2^(P_SHIFT - pexp): inside fp16's normal range with scales up to 1 (256 for e4m3)
constexpr int P_SHIFT = META == 2 ? 6 : 13;
#ifndef UNROLL_K
#define UNROLL_K 2
#endif
constexpr int K_UNROLL = UNROLL_K;
constexpr float LOG2E = 1.4426950408889634f;
#define NEG_INF __int_as_float(0xff800000)

// Position of token tile p inside a masked word, as a power of two
__host__ __device__ constexpr int pexp(int bits, int p) {
  return bits == 8 ? 0 : bits == 4 ? 4 * (p & 1) : 2 * (p < 5 ? p : p - 5);
}
__host__ __device__ constexpr float pow2(int e) { return e < 0 ? 1.0f / (1u << -e) : (float)(1u << e); }
constexpr int VE = VBITS == 8 ? 0 : VBITS == 4 ? 4 : 8;  // largest pexp of the values

struct Args {
  const u16* q;  // (batch, query heads, QL, KD) strided
  long q_row, q_head, q_tok;
  const char* records;  // row * rec_row + block * rec_block + head * record bytes; with a table: entry * rec_block
  long rec_row, rec_block;
  const char* norms;
  long norm_row, norm_block;
  const int* table;  // (batch, table_row) pages, or null
  long table_row;
  const int* num_blocks;  // (batch)
  const int* tail_len;    // (batch), new tokens included
  const float* equalizer;  // (batch, heads, KD)
  const u16 *sink_k, *sink_v;  // (batch, heads, sinks, dim) contiguous
  const u16 *tail_k, *tail_v;  // row * tail_row + head * tail_head + token * dim, tail_*_v for values
  long tail_row_k, tail_head_k, tail_row_v, tail_head_v;
  u16* out;  // (batch, QL, query heads, VD) contiguous
  const float* sink_logits;  // (query heads) or null
  char* rotated;    // (batch, pairs, Q_BYTES): what `rotate_queries` made
  float* part_o;    // (slots, NT * QCOLS, VD)
  float2* part_ml;  // (slots, NT * QCOLS): maximum (log2) and sum
  int batch, heads, group, q_len, passes, num_sinks, warps;  // warps: of the whole grid
  float scaling, softcap;
};

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

// ---- packed words -> A fragments ----
// Words of one lane and channel tile that hold token tile p (and its neighbours in the same words)
template <int BITS>
struct Words {
  uint4 w;
  uint2 x;  // 1-bit plane of 3-bit codes
  static constexpr int PER = BITS == 4 ? 4 : BITS == 8 ? 2 : 8;  // token tiles per word
  __device__ __forceinline__ void load(u32 base, int set, int tile, int tiles, int lane) {
    w = lds128(base + ((set * tiles + tile) * 32 + lane) * 16);
    if (BITS == 3) x = lds64(base + tiles * 512 + (tile * 32 + lane) * 8);
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

// ---- work list ----
struct Row {
  int blocks, tail;  // packed blocks, tail length
  __device__ __forceinline__ int items(const Args& a) const { return blocks + (blocks && a.num_sinks ? 1 : 0) + (tail + 15) / 16; }
};

struct Item {  // all lanes of a warp hold the same
  int row, pair, index;    // pair = head * passes + pass; index in the row's items
  int blocks, tail, n;     // of the row: packed blocks, tail length, items
  const Row* rows;         // in shared memory
  const char *rec, *norm;  // this head's first record and norms; with a table, of the pool's first page
  __device__ __forceinline__ void load_row(const Args& a) { blocks = rows[row].blocks, tail = rows[row].tail, n = rows[row].items(a); }
  __device__ __forceinline__ void load_pair(const Args& a) {
    const int head = pair / a.passes;
    rec = a.records + row * a.rec_row + (long)head * (K_BYTES + V_BYTES);
    norm = a.norms + row * a.norm_row + (NORM == 2 ? head * 256 : 0);
  }
  __device__ __forceinline__ void advance(const Args& a) {
    if (++index < n) return;
    index = 0;
    if (++pair == a.heads * a.passes) {
      pair = 0;
      do { if (++row >= a.batch) return; load_row(a); } while (n == 0);
    }
    load_pair(a);
  }
  __device__ __forceinline__ bool packed() const { return index < blocks; }
  __device__ __forceinline__ int segment(const Args& a) const { return 2 * (row * a.heads * a.passes + pair) + (index >= blocks); }
};

// The list is cut into one range per warp, equal but for one item. Neighbours sit on different multiprocessors.
struct Split {
  int base, extra;
  __device__ __forceinline__ Split(int items, int warps) : base(items / warps), extra(items % warps) {}
  __device__ __forceinline__ int start(int r) const { return base * r + min(r, extra); }
  __device__ __forceinline__ int count(int r) const { return base + (r < extra); }
  __device__ __forceinline__ int range_of(int item) const {
    const int head = extra * (base + 1);
    return item < head ? item / (base + 1) : extra + (item - head) / base;
  }
};

// ---- copies into the warp's stage ----
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar, int lane) {
#if PTX_90
  if (lane == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
#else
  for (u32 i = lane * 16; i < bytes; i += 512) cp_async16(dst + i, (const char*)src + i, 16);
#endif
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes, int lane) {
#if PTX_90
  if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for the older of at most two outstanding copies: packed ones on the barrier (sm_90), others by group
__device__ __forceinline__ void wait(u32 bar, u32 phase, bool packed) {
#if PTX_90
  if (packed) {
    asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra W; D:}" ::"r"(bar), "r"(phase) : "memory");
    return;
  }
#endif
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}

__host__ __device__ constexpr int swizzle_mask(int chunks) { return chunks % 8 == 0 ? 7 : chunks % 4 == 0 ? 3 : 1; }
// 16-byte chunk `chunk` of row `row` of an exact tile (16, DIM)
template <int DIM>
__device__ __forceinline__ u32 exact_at(u32 base, int row, int chunk) { return base + (row * (DIM / 8) + (chunk ^ (row & swizzle_mask(DIM / 8)))) * 16; }
template <int DIM>
__device__ __forceinline__ void copy_exact(u32 dst, const u16* src, int rows, int lane) {
#pragma unroll
  for (int i = 0; i < 16 * DIM / 8; i += 32) {
    const int c = i + lane, row = c / (DIM / 8), chunk = c % (DIM / 8);
    if (16 * DIM / 8 % 32 == 0 || c < 16 * DIM / 8) cp_async16(exact_at<DIM>(dst, row, chunk), row < rows ? src + row * DIM + chunk * 8 : src, row < rows ? 16 : 0);
  }
}

// Start of the exact tile: which tokens, and how many of the 16 are there
__device__ __forceinline__ bool exact_source(const Args& a, const Item& it, int& first, int& count) {
  const int e = it.index - it.blocks, sink = it.blocks && a.num_sinks;
  first = 16 * (e - sink);
  count = e < sink ? a.num_sinks : it.tail - first;
  return e < sink;
}

__device__ __forceinline__ void fetch_queries(const Args& a, const Item& it, u32 qs, u32 bar, int lane) {
  bulk_copy(qs, a.rotated + (long)(it.row * a.heads * a.passes + it.pair) * Q_BYTES, Q_BYTES, bar, lane);
}
// Start to copy the keys (and the queries, where the pair is a new one) or the values of an item
template <bool KEYS>
__device__ __forceinline__ void fetch(const Args& a, const Item& it, u32 stage, u32 bar, int lane, u32 qs = 0, bool fresh = false, bool later = false) {
  if (it.packed()) {
    const long block = a.table ? a.table[it.row * a.table_row + it.index] : it.index;
    const char* rec = it.rec + block * a.rec_block;
    if (KEYS) {
      expect(bar, K_BYTES + NORM_BYTES + (fresh ? Q_BYTES : 0), lane);
      bulk_copy(stage, rec, K_BYTES, bar, lane);
      if (fresh && !later) fetch_queries(a, it, qs, bar, lane);
      if (NORM) bulk_copy(stage + K_BYTES, it.norm + block * a.norm_block, 256, bar, lane);
    } else {
      expect(bar, V_BYTES, lane);
      bulk_copy(stage, rec + K_BYTES, V_BYTES, bar, lane);
    }
  } else {
    int first, count;
    constexpr int DIM = KEYS ? KD : VD;
    const int head = it.pair / a.passes;
    const u16* src;
    if (exact_source(a, it, first, count)) src = (KEYS ? a.sink_k : a.sink_v) + (long)(it.row * a.heads + head) * a.num_sinks * DIM;
    else src = KEYS ? a.tail_k + it.row * a.tail_row_k + head * a.tail_head_k + first * DIM : a.tail_v + it.row * a.tail_row_v + head * a.tail_head_v + first * DIM;
    copy_exact<DIM>(stage, src, count, lane);
  }
  commit();
}

// ---- queries ----
// Column `col` of a pass: its query and head, or -1 where there is none
__device__ __forceinline__ const u16* query_of(const Args& a, int row, int pair, int col) {
  const int head = pair / a.passes, n = (pair % a.passes) * COLS + col;
  if (n >= a.group * a.q_len) return nullptr;
  return a.q + row * a.q_row + (long)(head * a.group + n % a.group) * a.q_head + (long)(n / a.group) * a.q_tok;
}

// First launch: equalized, rotated queries as B operands (fp16, scaled by a power of two), and for each column tile the
// factor that undoes it, times the softmax scale (base 2). One warp per (row, head, pass); lane (gid, tid) holds
// channels 16 ct + 8 r1 + 2 tid + h of column gid.
extern "C" __global__ void __launch_bounds__(32) rotate_queries(const __grid_constant__ Args a) {
  const int lane = threadIdx.x, gid = lane >> 2, tid = lane & 3, pairs = a.heads * a.passes;
  const int row = blockIdx.x / pairs, pair = blockIdx.x % pairs;
  char* out = a.rotated + (long)blockIdx.x * Q_BYTES;
#if PTX_90
  asm volatile("griddepcontrol.launch_dependents;");
#endif
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
__device__ __forceinline__ uint2 query_fragment(u32 qs, int t, int ct, int lane) {
  if (QCOLS == 8 || lane < 4 * QCOLS) return lds64(qs + ((t * KT + ct) * 4 * QCOLS + lane) * 8);
  return make_uint2(0u, 0u);
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
  const int gid = lane >> 2, tid = lane & 3;
  float s[NT][8][4];
  {  // centers: rows of A are the groups' scales, then their centers, which lie one after the other
    float b[NT][4];
#pragma unroll
    for (int t = 0; t < NT; ++t) b[t][0] = b[t][1] = b[t][2] = b[t][3] = 0.0f;
#pragma unroll 4
    for (int ct = 0; ct < KT; ++ct) {
      u32 A[4] = {0u, 0u, 0u, 0u};
      const uint2 lo = meta4(ks + K_SCALE + ((min(gid, 2 * KG - 1) * KT + ct) * 4 + tid) * 4 * MB);
      A[0] = lo.x, A[2] = lo.y;
      if (KG == 8) {
        const uint2 hi = meta4(ks + K_SCALE + (((gid + 8) * KT + ct) * 4 + tid) * 4 * MB);
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
          const uint2 sc = meta4(ks + K_SCALE + ((p / (KGROUP / 16) * KT + ct) * 4 + tid) * 4 * MB);
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
  if (it.index == 0 && a.num_sinks) {  // sinks are read from their 16-bit copy
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
  for (int g = 0; g < VG; ++g) {
    u32 b[NT][8][2];
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      const uint2 sc = meta4(vs + V_SCALE + ((g * 8 + p) * 4 + tid) * 4 * MB);
#pragma unroll
      for (int t = 0; t < NT; ++t) b[t][p][0] = hmul2(pb[t][p][0], sc.x), b[t][p][1] = hmul2(pb[t][p][1], sc.y);
    }
    constexpr int ABREAST = VGROUP / 16 % 2 ? 1 : 2;  // channel tiles side by side: independent chains
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
      const int token = gid + 8 * (i >> 1), n = (it.pair % a.passes) * COLS + 8 * t + 2 * tid + (i & 1);
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

__device__ __forceinline__ void store_partial(const Args& a, int slot, bool packed, int lane, State& st) {
  const int gid = lane >> 2, tid = lane & 3;
#pragma unroll
  for (int t = 0; t < NT; ++t) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) st.l[t][c] += __shfl_xor_sync(~0u, st.l[t][c], d);
#pragma unroll
    for (int g = 0; g < VG; ++g) {
      float center[2] = {0.0f, 0.0f};
      if (packed)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int zs = g, zc = VG + g;
          const float vs = __shfl_sync(~0u, st.z[t][zs / 16][(zs / 8 % 2) * 2 + c], 4 * (zs % 8) + tid);
          const float vc = __shfl_sync(~0u, st.z[t][zc / 16][(zc / 8 % 2) * 2 + c], 4 * (zc % 8) + tid);
          center[c] = (vc - 0.5f * V_LEVELS * vs) * (pow2(VE) / pow2(P_SHIFT));
        }
      const float f = packed ? pow2(24 - P_SHIFT) : 1.0f;
#pragma unroll
      for (int ct = g * (VGROUP / 16); ct < (g + 1) * (VGROUP / 16); ++ct)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col = 8 * t + 2 * tid + (i & 1);
          if (col < 8 * t + QCOLS) a.part_o[((long)slot * (NT * QCOLS) + col) * VD + 16 * ct + gid + 8 * (i >> 1)] = fmaf(st.o[t][ct][i], f, center[i & 1]);
        }
    }
    if (gid == 0)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (2 * tid + c < QCOLS) a.part_ml[slot * (NT * QCOLS) + 8 * t + 2 * tid + c] = make_float2(st.m[t][c], st.l[t][c]);
  }
}

// Place `item` of the list. prefix: (batch + 1) items of one pair of the rows before
__device__ __forceinline__ void locate(const Args& a, const int* prefix, int item, Item& it) {
  const int pairs = a.heads * a.passes;
  int lo = 0, hi = a.batch;  // prefix[lo] * pairs <= item < prefix[hi] * pairs
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if (prefix[mid] * pairs <= item) lo = mid;
    else hi = mid;
  }
  it.row = lo;
  it.load_row(a);
  item -= prefix[lo] * pairs;
  it.pair = item / it.n;
  it.index = item % it.n;
  it.load_pair(a);
}
// Items of one pair of the rows before `row`, and of all rows
__device__ __forceinline__ int2 items_before(const Args& a, int row, int lane) {
  int2 v = {0, 0};
  for (int r = lane; r < a.batch; r += 32) {
    const int n = Row{a.num_blocks[r], a.tail_len[r]}.items(a);
    v.x += r < row ? n : 0, v.y += n;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) v.x += __shfl_xor_sync(~0u, v.x, d), v.y += __shfl_xor_sync(~0u, v.y, d);
  return v;
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
  for (int r = threadIdx.x; r < a.batch; r += WARPS * 32) rows[r] = Row{a.num_blocks[r], a.tail_len[r]};
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
  constexpr bool AHEAD = PTX_90;  // keys and values are on their way while `rotate_queries` still runs
  fetch<true>(a, cur, ks, bars, lane, qs, true, AHEAD);
  fetch<false>(a, cur, vs, bars + 8, lane);
#if PTX_90
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if (AHEAD && cur.packed()) fetch_queries(a, cur, qs, bars, lane);
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

// Merge the partials of each (row, head, pass) and column in use: rotate the packed part back, add the exact part.
// MERGE warps share the partials of a column; a lane holds channels 128 k + 4 lane + j.
constexpr int SPANS = (VD + 127) / 128;
struct Merged { float m, l, o[SPANS][4]; };

__device__ __forceinline__ void rescale(Merged& r, float m) {
  const float f = r.m == NEG_INF ? 0.0f : ex2(r.m - m);
  r.m = m;
  r.l *= f;
#pragma unroll
  for (int i = 0; i < SPANS * 4; ++i) r.o[i >> 2][i & 3] *= f;
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
  const Row it = used ? Row{a.num_blocks[row], a.tail_len[row]} : Row{0, 0};
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
#if PTX_90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  Merged packed, exact;
  packed.m = exact.m = NEG_INF;
  packed.l = exact.l = 0.0f;
#pragma unroll
  for (int i = 0; i < SPANS * 4; ++i) packed.o[i >> 2][i & 3] = exact.o[i >> 2][i & 3] = 0.0f;
#pragma unroll 1
  for (int kind = 0; kind < 2; ++kind) {
    Merged part = kind ? exact : packed;
    const long s = (long)slot[kind] * COLUMNS + tile_col;
    if (parts[kind]) merge_parts(a.part_ml + s, (const float4*)(a.part_o + s * VD), parts[kind], warp % MERGE, MERGE, lane, part);
    if (kind) exact = part;
    else packed = part;
  }
  if (MERGE > 1) {  // the packed part is the long one: add up what the warps of this column found
    shared[warp][lane] = packed;
    __syncthreads();
    if (warp == 0)
#pragma unroll 1
      for (int w = 1; w < MERGE; ++w) {
        Merged other = shared[w][lane];
        const float m = fmaxf(packed.m, other.m);
        rescale(packed, m), rescale(other, m);
        packed.l += other.l;
#pragma unroll
        for (int i = 0; i < SPANS * 4; ++i) packed.o[i >> 2][i & 3] += other.o[i >> 2][i & 3];
      }
    __syncthreads();
    shared[warp][lane] = exact;
    __syncthreads();
    if (warp != 0) return;
#pragma unroll 1
    for (int w = 1; w < MERGE; ++w) {
      Merged other = shared[w][lane];
      const float m = fmaxf(exact.m, other.m);
      rescale(exact, m), rescale(other, m);
      exact.l += other.l;
#pragma unroll
      for (int i = 0; i < SPANS * 4; ++i) exact.o[i >> 2][i & 3] += other.o[i >> 2][i & 3];
    }
  }
  if (!used) return;
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
