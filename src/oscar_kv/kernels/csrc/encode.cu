// Kernels that pack blocks: see encode.cuh. token_norms goes from the first block to the last, encode_blocks back, and
// so it finds the keys of many blocks in L2. It starts while token_norms ends.

#include "encode.cuh"
#include "start.cuh"

// token_norms
__device__ __forceinline__ void wait_for_norms(const Args&, int) { wait_for_launch(); }

// Block `number` of those that a row packs.
__device__ __forceinline__ Spot spot_of(const Args& a, int row, int number) {
    return {row, a.starts[row] + BLOCK_TOKENS * number, a.places[row] + number};
}

// Grid (heads, rows): for rows whose next block is their first.
extern "C" __global__ void __launch_bounds__(256) start_rows(const __grid_constant__ Args a) {
    const Spot spot = spot_of(a, blockIdx.y, 0);
    if (a.counts[spot.row] && spot.place == 0) start_row(a, spot, blockIdx.x);
}

// Grid (2 * heads, most blocks, rows): keys and values alternate, so that each multiprocessor has some of both.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) encode_blocks(const __grid_constant__ Args a) {
    const int head = blockIdx.x / 2, block = gridDim.y - 1 - blockIdx.y, row = gridDim.z - 1 - blockIdx.z;
    if (block < a.counts[row]) {
        if (blockIdx.x % 2 == 0)
            encode_side<true>(a, spot_of(a, row, block), head);
        else
            encode_side<false>(a, spot_of(a, row, block), head);
    }
    wait_for_launch();  // what follows this kernel also follows token_norms
}

constexpr int NORM_TOKENS = 32;

// Grid (4 * most blocks, 1 or heads, rows), 256 threads: NORM_TOKENS tokens a CTA, over all heads or for one.
extern "C" __global__ void __launch_bounds__(256) token_norms(const __grid_constant__ Args a) {
    constexpr int CTAS_PER_BLOCK = BLOCK_TOKENS / NORM_TOKENS;
    allow_launch();
    const int block = blockIdx.x / CTAS_PER_BLOCK, row = blockIdx.z;
    if (block >= a.counts[row]) return;
    const int first_token = blockIdx.x % CTAS_PER_BLOCK * NORM_TOKENS;
    norms_of_tokens<NORM_TOKENS>(a, spot_of(a, row, block), first_token, SCOPE ? blockIdx.y : 0, SCOPE ? 1 : a.heads);
}
