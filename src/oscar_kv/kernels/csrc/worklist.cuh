// The flat list of items that the warps of decode walk, and the copies of an item into shared memory.
#pragma once
#include "fragments.cuh"

// ---- work list ----
__device__ __forceinline__ int sink_tiles(const Args& a, int blocks) { return blocks ? (a.num_sinks + 15) / 16 : 0; }
struct Row {
  int blocks, tail;  // packed blocks; tokens in the tail, new ones included
  __device__ __forceinline__ static Row of(const Args& a, int row) { return Row{a.num_blocks[row], a.tail_len[row] + a.fresh}; }
  __device__ __forceinline__ int items(const Args& a) const { return blocks + sink_tiles(a, blocks) + (tail + 15) / 16; }
};

struct Item {  // all lanes of a warp hold the same
  int row, pair, index;    // pair = head * passes + pass; index in the row's items, exact ones first
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
  __device__ __forceinline__ int exact() const { return n - blocks; }
  __device__ __forceinline__ bool packed() const { return index >= exact(); }
  __device__ __forceinline__ int block() const { return index - exact(); }
  __device__ __forceinline__ int unit(const Args& a) const { return row * a.heads * a.passes + pair; }
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
// Before a bulk copy overwrites what ordinary instructions have read or written
__device__ __forceinline__ void fence_copies() {
#if PTX_90
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void init_barriers(u32 bars, int lane) {
#if PTX_90
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
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
  const int sinks = sink_tiles(a, it.blocks);
  first = 16 * (it.index < sinks ? it.index : it.index - sinks);
  count = (it.index < sinks ? a.num_sinks : it.tail) - first;
  return it.index < sinks;
}

__device__ __forceinline__ void fetch_queries(const Args& a, const Item& it, u32 qs, u32 bar, int lane) {
  bulk_copy(qs, a.rotated + (long)it.unit(a) * Q_BYTES, Q_BYTES, bar, lane);
}
// Where blocks of the item's head would begin in the piece that holds its block
__device__ __forceinline__ void shared_block(const Args& a, const Item& it, const char*& rec, const char*& norm) {
  const Piece* piece = a.pieces;
  while (it.block() >= piece->end) ++piece;
  const int head = it.pair / a.passes;
  rec = (const char*)piece->records + it.row * piece->record_row + (long)head * (K_BYTES + V_BYTES);
  norm = (const char*)piece->norms + it.row * piece->norm_row + (NORM == 2 ? head * 256 : 0);
}
// Start to copy the keys (and the queries, where the pair is a new one) or the values of an item
template <bool KEYS>
__device__ __forceinline__ void fetch(const Args& a, const Item& it, u32 stage, u32 bar, int lane, u32 qs = 0, bool fresh = false, bool later = false) {
  if (it.packed()) {
    const long block = a.table ? a.table[it.row * a.table_row + it.block()] : it.block();
    const char *rec = it.rec, *norm = it.norm;
    if (PIECES && it.block() < a.first) shared_block(a, it, rec, norm);
    rec += block * a.rec_block, norm += block * a.norm_block;
    if (KEYS) {
      expect(bar, K_BYTES + NORM_BYTES + (fresh ? Q_BYTES : 0), lane);
      bulk_copy(stage, rec, K_BYTES, bar, lane);
      if (fresh && !later) fetch_queries(a, it, qs, bar, lane);
      if (NORM) bulk_copy(stage + K_BYTES, norm, 256, bar, lane);
    } else {
      expect(bar, V_BYTES, lane);
      bulk_copy(stage, rec + K_BYTES, V_BYTES, bar, lane);
    }
  } else {
    int first, count;
    constexpr int DIM = KEYS ? KD : VD;
    const int head = it.pair / a.passes;
    const u16* src;
    if (exact_source(a, it, first, count)) src = (KEYS ? a.sink_k : a.sink_v) + ((long)(it.row * a.heads + head) * a.num_sinks + first) * DIM;
    else src = KEYS ? a.tail_k + it.row * a.tail_row_k + head * a.tail_head_k + first * DIM : a.tail_v + it.row * a.tail_row_v + head * a.tail_head_v + first * DIM;
    copy_exact<DIM>(stage, src, count, lane);
  }
  commit();
}

// ---- queries ----
// Query (n = query * group + head of the group) of a column of a pass; of those that partials hold, which are fewer
__device__ __forceinline__ int query_of_column(const Args& a, int pair, int col) { return (pair % a.passes) * COLS + col; }
__device__ __forceinline__ int query_of_kept(const Args& a, int pair, int kept) { return query_of_column(a, pair, kept / QCOLS * 8 + kept % QCOLS); }
// Where the query of a column lies, or null where there is none
__device__ __forceinline__ const u16* query_of(const Args& a, int row, int pair, int col) {
  const int head = pair / a.passes, n = query_of_column(a, pair, col);
  if (n >= a.group * a.q_len) return nullptr;
  return a.q + row * a.q_row + (long)(head * a.group + n % a.group) * a.q_head + (long)(n / a.group) * a.q_tok;
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
    const int n = Row::of(a, r).items(a);
    v.x += r < row ? n : 0, v.y += n;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) v.x += __shfl_xor_sync(~0u, v.x, d), v.y += __shfl_xor_sync(~0u, v.y, d);
  return v;
}
