// chain: stages one after the other, each over the whole card, in one launch
// launch   one block an SM in clusters of 2: COMPUTERS warps compute, of which WARPS all stages, COPIERS copy weights
// source   the stages' own folders; mod.rs says what may follow what
//
// Between two stages all blocks meet. The copying warps do not: they run ahead through the weights of all products, so that memory is
// read while sums are added up, blocks meet and activations arrive.
//
// Defines: those of the stages that occur.

// Where blocks meet: everything that was written before is visible after. Among compute warps.
struct Meeting {
    u64* arrivals;
    u64 target;
    __device__ __forceinline__ void meet() {
        barrier(4, 32 * COMPUTERS);
        if (threadIdx.x == 0) {
            if (target == 0) {
                u64 before;
                asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(arrivals) : "memory");
                target = before - before % gridDim.x + gridDim.x;
            } else {
                asm volatile("red.add.release.gpu.global.u64 [%0], 1;" ::"l"(arrivals) : "memory");
                target += gridDim.x;
            }
            u64 now;
            do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(arrivals) : "memory");
            while (now < target);
        }
        barrier(4, 32 * COMPUTERS);
    }
};

#if defined(GDN_BLOCK) && COMPUTERS > WARPS
#error a mixer beside wide products
#endif
#ifdef GDN_BLOCK
// A head of a lane for each cluster at a time. The first begins before the blocks meet.
__device__ __forceinline__ void gdn_stage(gdn::Shared& mixing, const u64* word, Meeting& meeting, bool meets, u32& exchanges) {
    const u32 heads = (u32)word[14] * gdn::VALUE_HEADS;
#pragma unroll 1
    for (u32 head = blockIdx.x / 2; head < heads; head += gridDim.x / 2) {
        gdn::Item item;
        gdn::begin(mixing, item, word, head);
        if (meets) meeting.meet(), meets = false;
        gdn::finish(mixing, item, word, exchanges);
    }
    if (meets) meeting.meet();
}
#endif

extern "C" __global__ void __launch_bounds__(32 * (COMPUTERS + COPIERS), 1) chain(const __grid_constant__ Program program) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, count = program.count;
#ifdef GDN_BLOCK
    __shared__ gdn::Shared mixing;
    if (threadIdx.x == 0) gdn::init(mixing);
#endif
#ifdef BLOCKS
    const Stream stream = begin_stream(shared);
#endif
    // Blocks of a cluster write into each other's memory: both must be there, and stay.
    if (threadIdx.x == 0) phase_init_fence();
    __syncthreads();
    cluster_arrive();
    launch_next();
    if (warp >= COMPUTERS) {
#ifdef BLOCKS
        copy_stream(stream, program, warp - COMPUTERS, lane);
        __syncwarp();
#endif
        cluster_wait();
    } else {
#ifdef BLOCKS
        Block block = begin_block(stream, warp, lane);
#endif
#ifdef GDN_BLOCK
        u32 exchanges = 0;
#endif
        Meeting meeting = {program.meetings, 0};
        wait();
        cluster_wait();
        for (u32 i = 0; i < count; i++) {
            const u64* word = program.word[i];
            const u32 kind = program.kind[i];
#ifdef BLOCKS
            Product next;
            if (kind == 0) next = Product(word);
#endif
#ifdef GDN_BLOCK
            if (kind == 4) {
                gdn_stage(mixing, word, meeting, i > 0, exchanges);
                continue;
            }
#endif
            if (i) meeting.meet();
#if defined(BLOCKS) && WIDE
            if (kind == 5) panels_stage(word, warp, lane);
#endif
            if (COMPUTERS > WARPS && kind != 0 && warp >= WARPS) continue;
            switch (kind) {
#ifdef BLOCKS
            case 0: product(next, word, block); break;
#endif
#ifdef NORM_WIDTH
            case 1: rms_norm_stage(word); break;
#endif
            case 2: silu_mul_stage(word); break;
            case 3: copy_rows_stage(word); break;
            }
        }
    }
    cluster_arrive();
    cluster_wait();
}
