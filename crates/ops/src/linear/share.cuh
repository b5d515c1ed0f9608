// What the products of a chain share: how a product is dealt to blocks, and the ring that its weights come through. Both kinds of
// product have these parts: `Stream`, `begin_stream`, by all threads; `copy_stream`, what copying warps do; `Block`, `begin_block` and
// `product`, by warps that compute.

#define WIDE (BLOCKS > 1 && __CUDA_ARCH__ == 900 ? 8 * BLOCKS : 0)  // rows of wide.cuh, which takes over beyond 8
#define CHUNK (WARPS * 64)  // inputs, of which each of a block's warps, or each of as many sums, takes 64

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One product: the words of its stage, and this block's share.
struct Product {
    const u8* x;
    u32 x_stride, rows, k, tiles, split;  // tiles: half tiles of a pass, at most
    const u8* w[4];
    u32 first[4];  // half tiles of the parts before
    u32 tile0, run, chunk0, chunk1;

    Product() = default;
    __device__ __forceinline__ explicit Product(const u64* word) {
        x = (const u8*)word[0];
        x_stride = word[1], rows = word[2], k = word[3], tiles = word[5], split = word[6];
        u32 all = 0;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            w[p] = (const u8*)word[7 + 3 * p];
            first[p] = all, all += ((u32)word[9 + 3 * p] + 15) / 16;
        }
        const u32 rank = split > 1 ? blockIdx.x % 2 : 0, dealt = split > 1 ? blockIdx.x / 2 : blockIdx.x;
        const u32 over = split > 1 ? gridDim.x / 2 : gridDim.x, chunks = (k + CHUNK - 1) / CHUNK;
        tile0 = dealt * all / over, run = (dealt + 1) * all / over - tile0;
        chunk0 = rank * chunks / split, chunk1 = (rank + 1) * chunks / split;
    }
    // Where a half tile's weights are.
    __device__ __forceinline__ const u8* half_tile(u32 tile) const {
        const u8* at = w[0];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (tile >= first[i]) at = w[i] + (u64)(tile - first[i]) * (k / SPAN * SPAN_BYTES);
        return at;
    }
};

// Hopper lets four warps give registers back and others take them, of as many as threads had at first: who copies needs few. All
// loops of a chain are slower where one spills.
template <int N>
__device__ __forceinline__ void give_registers() {
#if __CUDA_ARCH__ == 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
__device__ __forceinline__ void take_registers() {
#if __CUDA_ARCH__ == 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

// The ring and where a thread is in it.
struct Ring {
    u32 base, full, empty, slot, parity;
    __device__ __forceinline__ void next() {
        if (++slot == RING) slot = 0, parity ^= 1;
    }
};
