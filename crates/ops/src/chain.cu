// chain: stages one after the other, each over the whole card, in one launch
// launch   one block an SM in clusters of 2: COMPUTERS warps compute, of which WARPS all stages, COPIERS copy weights; beside wide
//          products, mixers have TEAMS of them
// source   the stages' own folders; mod.rs says what may follow what
//
// Between two stages all blocks meet. The copying warps do not: they run ahead through the weights of all products, so that memory is
// read while sums are added up, blocks meet and activations arrive.
//
// Defines: those of the stages that occur.

// Where blocks meet: everything that was written before a block arrives is visible after it has awaited the others. Among compute warps.
struct Meeting {
    u64* arrivals;
    u64 target;
    __device__ __forceinline__ void arrive() {
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
        }
        __syncwarp();
    }
    __device__ __forceinline__ void await() {
        u64 now = 0;
        if (threadIdx.x == 0)
            do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(arrivals) : "memory");
            while (now < target);
        barrier(4, 32 * COMPUTERS);
    }
};

#ifdef GDN_BLOCK
// A head of a lane for each team of a cluster at a time. What the first needs from before this pass is worked out while other blocks are
// awaited: in the stage before the product before, which is all that happens then (`ahead`), or now, if it has not `begun`.
__device__ __forceinline__ void gdn_stage(gdn::Shared& mixing, gdn::Peer& peer, const u64* word, Meeting& meeting, bool meets, bool ahead, bool begun) {
    const u32 heads = (u32)word[14] * gdn::VALUE_HEADS, clusters = gridDim.x / 2;
#pragma unroll 1
    for (u32 head = blockIdx.x / 2 + gdn::team() * clusters; head < heads; head += TEAMS * clusters, begun = false) {
        gdn::Item item;
        gdn::begin(mixing, item, word, head, begun);
        if (meets) meeting.await(), meets = false;
        if (ahead) return;
        gdn::finish(mixing, item, word, peer);
    }
    if (meets) meeting.await();
    // What comes next into this memory may be copies.
    if (TEAMS > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(32 * (COMPUTERS + COPIERS), 1) chain(const __grid_constant__ Program program) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, count = program.count;
#ifdef BLOCKS
    const Stream stream = begin_stream(shared);
#endif
#ifdef GDN_BLOCK
    __shared__ gdn::Mailbox mailbox[TEAMS];
    if (threadIdx.x < TEAMS) gdn::init(mailbox[threadIdx.x]);
#if TEAMS > 1  // where products have theirs, but for the ring
    static_assert(TEAMS * sizeof(gdn::Shared) <= MIXING, "memory of mixers");
    gdn::Shared* const mixing = (gdn::Shared*)stream.shared;
#else
    __shared__ gdn::Shared mixing[1];
#endif
#endif
    // Blocks of a cluster write into each other's memory: both must be there, and stay.
    if (threadIdx.x < 32) phase_init_fence();
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
        gdn::Peer peer = {mailbox[gdn::team()], 0};
        bool begun = false;
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
            if (i) meeting.arrive();
#ifdef GDN_BLOCK
#if defined(NORM_WIDTH) && TEAMS == 1
            // Not where there is a row to norm: for that, others wait. And not past anything but a product, which leaves lane memory alone.
            const bool idle = kind == 1 && first_norm_row() >= (u32)word[5];
            const bool ahead = idle && i + 2 < count && program.kind[i + 1] == 0 && program.kind[i + 2] == 4;
#else
            const bool ahead = false;
#endif
            if (kind == 4 || ahead) {
                gdn_stage(mixing[gdn::team()], peer, ahead ? program.word[i + 2] : word, meeting, i > 0, ahead, begun);
                begun = ahead;
                continue;
            }
#endif
            if (i) meeting.await();
            switch (kind) {
#ifdef BLOCKS
            case 0: product(next, word, block); break;
#if WIDE
            case 5: panels_stage(word, warp, lane); break;
#endif
#endif
            case 2: silu_mul_stage(word, warp, lane); break;
            }
            if (COMPUTERS > WARPS && warp >= WARPS) continue;
            switch (kind) {
#ifdef NORM_WIDTH
            case 1: rms_norm_stage(word); break;
#endif
            case 3: copy_rows_stage(word); break;
            }
        }
    }
    cluster_arrive();
    cluster_wait();
}
