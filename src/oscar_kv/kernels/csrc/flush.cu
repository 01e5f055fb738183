// The 16-bit tail of each row on the device: the counterpart of LayerState.append and of packing, for CUDA graphs. No
// length is known to the host; a step launches
//
//   append -> attention (lengths + new tokens) -> flush
//
// and flush returns at once where no row has a complete block. Layers whose rows have the same lengths may share a
// flush, after the last of them: then what is due is enough work for the GPU. Defines: those of encode.cuh.

#include "encode.cuh"
#include "start.cuh"

// Grid (tokens, rows): one new token of a row, all heads. Its place is lengths + its number.
extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ Args a) {
    allow_launch();
    wait_for_launch();
    const int token = blockIdx.x, row = blockIdx.y, length = a.lengths[row], place = length + token;
    for (int i = threadIdx.x; i < a.heads * PIECES; i += THREADS) {
        const int head = i / PIECES, piece = i % PIECES, other = piece - KEY_PIECES;
        const i64 slot = ((i64)row * a.heads + head) * a.capacity + place;
        const u8* key = a.keys + row * a.key_row + head * a.key_head + (i64)token * a.key_token;
        const u8* value = a.values + row * a.value_row + head * a.value_head + (i64)token * a.value_token;
        const bool is_key = piece < KEY_PIECES;
        // on their way while the length is
        const uint4 numbers = load_piece(is_key ? key + piece * 16 : value + other * 16);
        if (place >= a.capacity) continue;
        store_piece(
            is_key ? a.tail_keys + (slot * KEY_PIECES + piece) * 16 : a.tail_values + (slot * VALUE_PIECES + other) * 16,
            numbers);
    }
    if (token == 0 && threadIdx.x == 0) {
        a.totals[row] = length + a.tokens;
        a.blocks_before[row] = a.num_blocks[row];
        a.norms_done[row] = 0;
        if (row == 0) *a.arrived = 0;
    }
}

// All threads of this CTA have written what CTAs count with `counter`.
__device__ __forceinline__ void announce(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// A warp waits until `target` has been counted, and sees what was written before.
__device__ __forceinline__ void await(const u32* counter, u32 target) {
    if (threadIdx.x % 32 == 0) {
        u32 count;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
        } while (count < target);
    }
    __syncwarp();
}

constexpr int LAYERS = 15;  // of a launch, at most

struct Layers {
    Args of[LAYERS];
    int count;
};
static_assert(sizeof(Layers) <= 4096, "that is what all drivers pass to a kernel");

// All CTAs of a cooperative grid wait for each other, for the `times`-th time.
__device__ __forceinline__ void grid_barrier(const Args& a, u32& times) {
    announce(a.arrived);
    await(a.arrived, ++times * gridDim.x);
}

constexpr int ROWS = 128;  // that are looked at at a time

// Those of them that pack blocks now, in order.
struct Due {
    int count, rows[ROWS], blocks[ROWS], places[ROWS], left[ROWS];
    bool fresh, rest;  // some row packs its first block, has tokens left

    __device__ __forceinline__ Spot spot(int i, int block) const {
        return {rows[i], BLOCK_TOKENS * block, places[i] + block};
    }
};

// All threads. Blocks are complete when residual_length tokens from their start on are there.
__device__ __forceinline__ void find_due(const Layers& layers, int first, Due& due) {
    const Args& a = layers.of[0];  // whose rows are as long as the others'
    __shared__ int of_warp[THREADS / 32];
    const int row = first + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool there = threadIdx.x < ROWS && row < a.rows;
    const int total = there ? a.totals[row] : 0, place = there ? a.blocks_before[row] : 0;
    const int blocks = max(0, total - (a.residual_length - BLOCK_TOKENS)) / BLOCK_TOKENS;
    const int left = total - BLOCK_TOKENS * blocks;
    const u32 some = __ballot_sync(ALL_LANES, blocks > 0);
    if (lane == 0) of_warp[warp] = __popc(some);
    const bool fresh = __syncthreads_or(blocks && place == 0), rest = __syncthreads_or(blocks && left);
    int before = 0, count = 0;
    for (int w = 0; w < ROWS / 32; w++) {
        if (w < warp) before += of_warp[w];
        count += of_warp[w];
    }
    if (blocks) {
        const int i = before + __popc(some & ((1u << lane) - 1));
        due.rows[i] = row, due.blocks[i] = blocks, due.places[i] = place, due.left[i] = left;
    }
    due.count = count, due.fresh = fresh, due.rest = rest;
    for (int i = blockIdx.x; there && i < layers.count; i += gridDim.x)
        layers.of[i].lengths[row] = left, layers.of[i].num_blocks[row] = place + blocks;
    __syncthreads();
}

// Move what is left of one head's tail to its front. In steps of the gap, so that none overlaps itself.
__device__ __forceinline__ void move_tail(const Args& a, int row, int head, int gap, int left) {
    const i64 first = ((i64)row * a.heads + head) * a.capacity;
    for (int to = 0; to < left; to += gap) {
        const int tokens = min(gap, left - to);
        u8* keys = a.tail_keys + (first + to) * KEY_PIECES * 16;
        u8* values = a.tail_values + (first + to) * VALUE_PIECES * 16;
        for (int i = threadIdx.x; i < tokens * KEY_PIECES; i += THREADS)
            copy_piece(keys + i * 16, keys + ((i64)gap * KEY_PIECES + i) * 16);
        for (int i = threadIdx.x; i < tokens * VALUE_PIECES; i += THREADS)
            copy_piece(values + i * 16, values + ((i64)gap * VALUE_PIECES + i) * 16);
        __syncthreads();
    }
}

constexpr int NORM_TOKENS = SCOPE ? 32 : 8, PARTS = BLOCK_TOKENS / NORM_TOKENS;  // of a CTA; CTAs of a block

// CTAs that take the norms of a row.
__device__ __forceinline__ int norm_tasks(const Args& a) { return NORM ? PARTS * (SCOPE ? a.heads : 1) : 0; }

__device__ __forceinline__ void wait_for_norms(const Args& a, int row) { await(a.norms_done + row, norm_tasks(a)); }

// Norms, then keys, then values of all that is due, dealt to the CTAs in turn: so keys wait for norms that others are at.
__device__ __forceinline__ void pack(const Layers& layers, const Due& due) {
    const int heads = layers.of[0].heads, groups = norm_tasks(layers.of[0]), items = layers.count * due.count;
    const int norms = items * groups, sides = items * heads;
    for (int i = blockIdx.x; i < norms + 2 * sides; i += gridDim.x) {
        const bool is_norm = i < norms, is_key = !is_norm && i < norms + sides;
        const int per_item = is_norm ? groups : heads, task = is_norm ? i : (i - norms) % sides;
        const int item = task / per_item, part = task % per_item, which = item % due.count;
        const Args& a = layers.of[item / due.count];
        for (int block = 0; block < due.blocks[which]; block++) {
            const Spot spot = due.spot(which, block);
            if (is_norm)
                norms_of_tokens<NORM_TOKENS>(a, spot, part % PARTS * NORM_TOKENS, part / PARTS, SCOPE ? 1 : heads);
            else if (is_key)
                encode_side<true>(a, spot, part);
            else
                encode_side<false>(a, spot, part);
            __syncthreads();
        }
        if (is_norm) announce(a.norms_done + due.rows[which]);
    }
}

// A cooperative grid of any size. keys and values are the tail.
extern "C" __global__ void __launch_bounds__(THREADS, 1) flush(const __grid_constant__ Layers layers) {
    __shared__ Due due;
    const Args& shape = layers.of[0];
    u32 barriers = 0;
    wait_for_launch();
    for (int first = 0; first < shape.rows; first += ROWS) {
        find_due(layers, first, due);
        if (due.count == 0) continue;
        const int items = due.count * shape.heads, all = layers.count * items;  // of a layer, and of all
        if (due.fresh) {
            for (int i = blockIdx.x; i < all; i += gridDim.x) {
                const Spot spot = due.spot(i % items / shape.heads, 0);
                if (spot.place == 0) start_row(layers.of[i / items], spot, i % shape.heads);
                __syncthreads();
            }
            grid_barrier(shape, barriers);
        }
        pack(layers, due);
        if (!due.rest) continue;
        grid_barrier(shape, barriers);
        for (int i = blockIdx.x; i < all; i += gridDim.x) {
            const int which = i % items / shape.heads, gap = BLOCK_TOKENS * due.blocks[which];
            move_tail(layers.of[i / items], due.rows[which], i % shape.heads, gap, due.left[which]);
        }
    }
}
