// linear of few rows: out[rows, n] (+)= x[rows, k] W[n, k]^T, weights read once at the speed of memory
// shapes   x bf16 rows; W in the order of fragments.rs; out f32; up to 8 BLOCKS rows; k a multiple of 64 and of the span
// launch   one block an SM in clusters of SPLIT, WARPS compute warps and one that copies
// traffic  the weights once; x once for each pass of TILES half tiles and block, from L2
// source   definition: mod.rs reference(); docs/decisions/few-row-matmul-on-hopper.md has what else was tried
//
// Work. The half tiles (16 outputs) of all parts are dealt to clusters in nearly equal runs; the SPLIT blocks of a cluster
// take contiguous parts of k. A block goes through its run in passes of TILES half tiles, and through k in chunks of 512
// inputs, of which each of its 8 warps takes 64. So a warp needs 64 inputs of each row at a time and keeps the sums of all half
// tiles of a pass. At the end of a pass the 8 warps' sums are added in order, then those of the cluster's blocks: an order
// fixed by n, k and the card. A row's bits are the same alone and among others.
//
// Stream. One more warp keeps a ring of RING stages full, STAGE half tiles of a chunk in each. Weights depend on nothing, so the
// ring fills before wait(). At most AHEAD stages are on their way: more don't speed up the stream, but activations queue behind.
//
// Defines: those of weight.cuh; BLOCKS, TILES, STAGE, RING, AHEAD, SPLIT above; ROUND half tiles are summed up at a time.

#define WARPS 8
#define CHUNK (WARPS * 64)
#define CHUNK_BYTES (CHUNK / SPAN * SPAN_BYTES)
#define ROUNDS ((TILES + ROUND - 1) / ROUND)
#define OWN ((TILES + SPLIT - 1) / SPLIT)  // half tiles of a pass that a block of a cluster stores
#define X_BYTES (BLOCKS * 8 * 128)         // a warp's 64 inputs of every row
#define X_AHEAD 3                          // chunks whose activations a warp holds

// Shared memory, in this order.
#define RING_BYTES (RING * STAGE * CHUNK_BYTES)
#define SUMS_AT (RING_BYTES + WARPS * X_AHEAD * X_BYTES)
#define CROSS_AT (SUMS_AT + WARPS * ROUND * BLOCKS * 512)
#define BARS_AT (CROSS_AT + (SPLIT > 1 ? SPLIT * OWN * BLOCKS * 512 : 0))

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void sync_compute() {
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}
// The same place in another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 a, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
    return r;
}

struct Parts {
    const u8* w[4];
    float* out[4];
    u32 n[4], first[4];  // outputs; half tiles of the parts before
};

// Two outputs of a lane: rows r and r + 1.
struct Target {
    float* at;  // null if there is nothing to store
    u32 next;   // to the second one; 0 if there is none
    float2 old;
};
__device__ __forceinline__ void store(const Target& to, float2 v) {
    if (to.at) to.at[0] = fmaf(v.x, UNSCALE, to.old.x);
    if (to.at && to.next) to.at[to.next] = fmaf(v.y, UNSCALE, to.old.y);
}

// sum += scale (codes x) + bias total, for STAGE half tiles and 64 inputs. Several half tiles side by side, for the matrix
// instructions of one depend on each other.
template <int COUNT>
__device__ __forceinline__ void multiply(float (*sum)[BLOCKS][4], const Unit (&w)[STAGE], const u32 (&b)[BLOCKS][4][2],
                                         const float (&total)[BLOCKS][SUBS][4]) {
#pragma unroll
    for (int u = 0; u < SUBS; u++) {
        float raw[COUNT][BLOCKS][4] = {};
#pragma unroll
        for (int j = u * 4 / SUBS; j < (u + 1) * 4 / SUBS; j++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                u32 a[4];
                codes_of_step(a, w[i], j);
#pragma unroll
                for (int r = 0; r < BLOCKS; r++) mma(raw[i][r], a, b[r][j][0], b[r][j][1]);
            }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float scale[2], bias[2];
            scales(w[i], u, scale, bias);
#pragma unroll
            for (int r = 0; r < BLOCKS; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[i][r][e] = fmaf(scale[e / 2], raw[i][r][e], fmaf(bias[e / 2], total[r][u][e % 2], sum[i][r][e]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1)
linear_few(const u8* x, u32 x_stride, u32 rows, u32 k, u32 adds, const u8* w0, float* out0, u32 n0, const u8* w1, float* out1, u32 n1,
           const u8* w2, float* out2, u32 n2, const u8* w3, float* out3, u32 n3) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 full = shared_address(shared) + BARS_AT, empty = full + 8 * RING, cross = empty + 8 * RING;

    Parts parts = {{w0, w1, w2, w3}, {out0, out1, out2, out3}, {n0, n1, n2, n3}, {}};
    u32 tiles = 0;
#pragma unroll
    for (int p = 0; p < 4; p++) parts.first[p] = tiles, tiles += (parts.n[p] + 15) / 16;
    const u32 rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    const u32 tile0 = cluster * tiles / clusters, run = (cluster + 1) * tiles / clusters - tile0;
    const u32 chunks = (k + CHUNK - 1) / CHUNK, chunk0 = rank * chunks / SPLIT, chunk1 = (rank + 1) * chunks / SPLIT;

    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, WARPS);
        if (SPLIT > 1) bar_init(cross, (SPLIT - 1) * WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // All warps arrive here: one that did so later would hold up those that arrived before.
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    launch_next();

    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    // Starts the copies of a stage: half tiles s .. of the pass that starts at `first`, in chunk c. By a whole warp, a half tile a lane.
    auto copy_stage = [&](u32 first, u32 s, u32 c, u32 slot) {
        const u32 count = min(min((u32)STAGE, TILES - s), run - first - s), bar = full + 8 * slot;
        const u32 bytes = min((u32)CHUNK, k - c * CHUNK) / SPAN * SPAN_BYTES, tile = tile0 + first + s + lane;
        if (lane == 0) bar_expect(bar, count * bytes);
        __syncwarp();
        if (lane < count) {
            const u8* from = parts.w[0];
#pragma unroll
            for (int p = 0; p < 4; p++)
                if (tile >= parts.first[p]) from = parts.w[p] + (u64)(tile - parts.first[p]) * (k / SPAN * SPAN_BYTES);
            bulk_load(shared_address(shared) + (slot * STAGE + lane) * CHUNK_BYTES, from + (u64)c * CHUNK_BYTES, bytes, bar, policy);
        }
        __syncwarp();
    };
    // All warps share the first copies: starting one takes its time.
    const u32 stages = (min(run, (u32)TILES) + STAGE - 1) / STAGE;  // of a chunk in the first pass
    const u32 begun = min((u32)AHEAD, stages * (chunk1 - chunk0));
    for (u32 i = warp; i < begun; i += WARPS + 1) copy_stage(0, i % stages * STAGE, chunk0 + i / stages, i);

    if (warp == WARPS) {  // the rest of the stream
        u32 slot = 0, parity = 1, i = 0, back = 0, back_parity = 0;
        for (u32 first = 0; first < run; first += TILES)
            for (u32 c = chunk0; c < chunk1; c++)
                for (u32 s = 0; s < TILES && first + s < run; s += STAGE, i++) {
                    if (i >= begun) {
                        bar_wait(full + 8 * back, back_parity);
                        if (++back == RING) back = 0, back_parity ^= 1;
                        bar_wait(empty + 8 * slot, parity);
                        copy_stage(first, s, c, slot);
                    }
                    if (++slot == RING) slot = 0, parity ^= 1;
                }
        __syncwarp();
        if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }

    const u32 g = lane / 4, t = lane % 4;
    const u32 my_x = shared_address(shared) + RING_BYTES + warp * X_AHEAD * X_BYTES;
    // Rows that are not there are zeros.
    for (u32 i = rows * 128 + lane * 4; i < X_BYTES; i += 128)
#pragma unroll
        for (int b = 0; b < X_AHEAD; b++) asm volatile("st.shared.u32 [%0], %1;" ::"r"(my_x + b * X_BYTES + i), "r"(0) : "memory");
    __syncwarp();
    wait();

    // Copies this warp's inputs of the next chunk: 128 bytes of a row, whose pieces of 16 are permuted so that no two rows of eight meet
    // in a bank.
    const u32 steps = (run + TILES - 1) / TILES * (chunk1 - chunk0);
    u32 ahead = chunk0, fetched = 0;
    auto fetch_x = [&](u32 buffer) {
        const u32 k0 = ahead * CHUNK + warp * 64;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) {
            const u32 row = i * 4 + lane / 8, piece = lane % 8, to = my_x + buffer * X_BYTES + row * 128 + (piece ^ row % 8) * 16;
            if (fetched < steps && row < rows && k0 < k)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + (u64)row * x_stride + k0 * 2 + piece * 16)
                             : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        fetched++;
        if (++ahead == chunk1) ahead = chunk0;
    };
#pragma unroll
    for (int i = 0; i < X_AHEAD; i++) fetch_x(i);

    u32 slot = 0, parity = 0, buffer = 0;
    for (u32 first = 0; first < run; first += TILES) {
        const u32 count = min((u32)TILES, run - first);
        float sum[TILES][BLOCKS][4] = {};
        for (u32 c = chunk0; c < chunk1; c++) {
            // B of this warp's 64 inputs, and the sums of its parts that share a scale.
            u32 b[BLOCKS][4][2];
            float total[BLOCKS][SUBS][4] = {};
            asm volatile("cp.async.wait_group %0;" ::"n"(X_AHEAD - 1) : "memory");
            __syncwarp();
#pragma unroll
            for (int r = 0; r < BLOCKS; r++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 row = lane % 8, at = my_x + buffer * X_BYTES + (r * 8 + row) * 128 + (h * 4 + lane / 8 ^ row) * 16;
                    load_matrices(b[r][2 * h], b[r][2 * h + 1], at);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    b[r][j][0] = mul_bf16x2(b[r][j][0], X_LOW), b[r][j][1] = mul_bf16x2(b[r][j][1], X_HIGH);
                    u32 a[4];
                    ones(a);
                    mma(total[r][j * SUBS / 4], a, b[r][j][0], b[r][j][1]);
                }
            }
            __syncwarp();
            fetch_x(buffer);
            if (++buffer == X_AHEAD) buffer = 0;
            const bool here = c * CHUNK + warp * 64 < k;  // false for some warps in a last chunk that is short
#pragma unroll
            for (int s = 0; s < TILES; s += STAGE) {
                if (s >= count) break;
                constexpr int last = TILES % STAGE ? TILES % STAGE : STAGE;
                const u8* stage = shared + slot * STAGE * CHUNK_BYTES;
                bar_wait(full + 8 * slot, parity);
                // Half tiles that are not there get sums that nobody reads.
                Unit w[STAGE];
#pragma unroll
                for (int i = 0; i < (s + STAGE < TILES ? STAGE : last); i++)
                    if (here) load_unit(w[i], stage + i * CHUNK_BYTES, warp, lane);
                __syncwarp();
                if (lane == 0) bar_arrive(empty + 8 * slot);
                if (++slot == RING) slot = 0, parity ^= 1;
                if (here && s + STAGE < TILES) multiply<STAGE>(sum + s, w, b, total);
                else if (here) multiply<last>(sum + s, w, b, total);
            }
        }

        // Adds the warps' sums. Item (i, r, h): half tile i of a round, 8 rows, outputs 8 h ..; a lane has two rows of it.
        constexpr int ROUND_ITEMS = ROUND * BLOCKS * 2, ALL_ITEMS = SPLIT > 1 ? OWN * BLOCKS * 2 : ROUND_ITEMS;
        constexpr int ITEMS = (ALL_ITEMS + WARPS - 1) / WARPS;  // of a warp
        float2* sums = (float2*)(shared + SUMS_AT);
        // Where an item of half tile i of the pass goes, and what is there if it is to be added to.
        auto target = [&](u32 i, u32 item) {
            const u32 row = item / 2 * 8 + 2 * t, tile = tile0 + first + i;
            u32 o = 0, n = 0;
            bool old = false;
            float* out = nullptr;
#pragma unroll
            for (int p = 0; p < 4; p++)
                if (tile >= parts.first[p])
                    o = (tile - parts.first[p]) * 16 + item % 2 * 8 + g, n = parts.n[p], out = parts.out[p], old = adds >> p & 1;
            Target to = {i < count && o < n && row < rows ? out + (u64)row * n + o : nullptr, row + 1 < rows ? n : 0, make_float2(0.f, 0.f)};
            if (old && to.at) to.old.x = to.at[0];
            if (old && to.at && to.next) to.old.y = to.at[to.next];
            return to;
        };
        Target targets[ITEMS];
        if (SPLIT > 1) {  // a single pass
#pragma unroll
            for (int m = 0; m < ITEMS; m++) {
                const u32 at = warp + m * WARPS;
                targets[m] = target(at < ALL_ITEMS ? at / (BLOCKS * 2) * SPLIT + rank : count, at % (BLOCKS * 2));
            }
            __syncwarp();
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            if (round * ROUND >= count) break;
            if (SPLIT == 1)
#pragma unroll
                for (int m = 0; m < ITEMS; m++) {
                    const u32 at = warp + m * WARPS;
                    targets[m] = target(at < ROUND_ITEMS ? round * ROUND + at / (BLOCKS * 2) : count, at % (BLOCKS * 2));
                }
            sync_compute();
#pragma unroll
            for (int i = 0; i < ROUND && round * ROUND + i < TILES; i++)
#pragma unroll
                for (int r = 0; r < BLOCKS; r++) {
                    const float(&v)[4] = sum[round * ROUND + i][r];
                    float2* to = sums + ((warp * ROUND + i) * BLOCKS + r) * 64 + lane;
                    to[0] = make_float2(v[0], v[1]), to[32] = make_float2(v[2], v[3]);
                }
            sync_compute();
#pragma unroll
            for (int m = 0; m < (ROUND_ITEMS + WARPS - 1) / WARPS; m++) {
                const u32 at = warp + m * WARPS, i = round * ROUND + at / (BLOCKS * 2);
                if (at >= ROUND_ITEMS || i >= count) break;
                float2 v = sums[at * 32 + lane];
#pragma unroll
                for (int w = 1; w < WARPS; w++) {
                    const float2 other = sums[(w * ROUND_ITEMS + at) * 32 + lane];
                    v.x += other.x, v.y += other.y;
                }
                if constexpr (SPLIT == 1) store(targets[m], v);
                else {
                    const u32 to = CROSS_AT + (((rank * OWN + i / SPLIT) * BLOCKS * 2 + at % (BLOCKS * 2)) * 32 + lane) * 8;
                    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(in_block(shared_address(shared) + to, i % SPLIT)), "f"(v.x), "f"(v.y)
                                 : "memory");
                }
            }
        }
        if constexpr (SPLIT > 1) {
            __syncwarp();
            if (lane < SPLIT && lane != rank)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(cross, lane)) : "memory");
            sync_compute();
            asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@!p bra again;\n}\n" ::"r"(
                             cross)
                         : "memory");
#pragma unroll
            for (int m = 0; m < ITEMS; m++) {
                const u32 at = warp + m * WARPS;
                if (at >= ALL_ITEMS) break;
                const float2* from = (const float2*)(shared + CROSS_AT) + at * 32 + lane;
                float2 v = from[0];
#pragma unroll
                for (int b = 1; b < SPLIT; b++) v.x += from[b * ALL_ITEMS * 32].x, v.y += from[b * ALL_ITEMS * 32].y;
                store(targets[m], v);
            }
        }
    }
}
#endif
