// out[rows, n] = x[rows, k] W[n, k]^T for few rows: weights stream through shared memory once, at the speed of memory.
//
// Work. The half tiles (16 outputs) of all parts are dealt to clusters in nearly equal runs. The inputs are cut into 16 classes,
// contiguous and nearly equal; the SPLIT blocks of a cluster take 16 / SPLIT of them each. A warp has one class and every SPLIT-th
// half tile of the run. It keeps the class's activations, as matrix fragments, in shared memory, and adds up a half tile's 64-input
// units in ascending order. The sums of the classes meet in shared memory, where one warp (another one for each half tile) adds them
// as a balanced tree. So the order of all sums depends on n, k and the card, never on the number of rows: a row's bits are
// the same alone and among others.
//
// Stream. The bytes of a half tile that a block needs are contiguous; they come in CUT copies, each into a slot of a ring of RING slots.
// Weights depend on nothing, so the ring fills before wait(). At most AHEAD slots are on their way at a time: more make no
// difference to the stream, but activations queue behind them.
//
// Defines: those of weight.cuh, and
//   BLOCKS  of 8 rows
//   SPLIT   blocks of a cluster: 1 or 2
//   RING, AHEAD  above; RING is a power of two
//   SUMS    half tiles whose sums are held at a time
//   MOST    half tiles of a run at most, if SPLIT is 2

#define WARPS 16
#define CLASSES (WARPS / SPLIT)  // of a block
#define UNIT_INPUTS (SPAN > 64 ? SPAN : 64)
#define UNIT_BYTES_ALL (UNIT_INPUTS / SPAN * SPAN_BYTES)
#define X_BYTES (BLOCKS * 1024)               // fragments of 64 inputs
#define TOTAL_BYTES (BLOCKS * SUBS * 32)      // and their sums
#define SUMS_BYTES (CLASSES * BLOCKS * 512)   // of a half tile

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
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
// The same place in another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 a, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
    return r;
}
// Four 8 x 8 matrices of bf16: lane 4 g + t gets elements 2 t, 2 t + 1 of row g of each; lane 8 i + r has the address of row r of matrix i.
__device__ __forceinline__ uint4 load_matrices(u32 a) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
    return v;
}
__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

struct Parts {
    const u8* w[4];
    float* out[4];
    u32 n[4], first[4];  // outputs; half tiles of the parts before
};

// One unit of 64 inputs: its sums, not yet scaled.
__device__ __forceinline__ void multiply(float (&raw)[SUBS][BLOCKS][4], const Unit& w, const u8* x, u32 lane) {
#pragma unroll
    for (int s = 0; s < SUBS; s++)
#pragma unroll
        for (int r = 0; r < BLOCKS; r++)
#pragma unroll
            for (int e = 0; e < 4; e++) raw[s][r][e] = 0.f;
    u32 b[BLOCKS][4][2];
#pragma unroll
    for (int r = 0; r < BLOCKS; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 v = ((const uint4*)x)[r * 64 + h * 32 + lane];
            b[r][2 * h][0] = v.x, b[r][2 * h][1] = v.y, b[r][2 * h + 1][0] = v.z, b[r][2 * h + 1][1] = v.w;
        }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        codes_of_step(a, w, j);
#pragma unroll
        for (int r = 0; r < BLOCKS; r++) mma(raw[j * SUBS / 4][r], a, b[r][j][0], b[r][j][1]);
    }
}
// sum += scale * raw + bias * total
__device__ __forceinline__ void accumulate(float (&sum)[BLOCKS][4], const float (&raw)[SUBS][BLOCKS][4], const Unit& w, const u8* totals, u32 t) {
#pragma unroll
    for (int s = 0; s < SUBS; s++) {
        float scale[2], bias[2];
        scales(w, s, scale, bias);
#pragma unroll
        for (int r = 0; r < BLOCKS; r++) {
            const float2 v = ((const float2*)totals)[(r * SUBS + s) * 4 + t];
            const float total[2] = {v.x, v.y};
#pragma unroll
            for (int e = 0; e < 4; e++) sum[r][e] = fmaf(scale[e / 2], raw[s][r][e], fmaf(bias[e / 2], total[e % 2], sum[r][e]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1)
linear_few(const u8* x, u32 x_stride, u32 rows, u32 k, u32 cut, u32 slot_bytes, u32 adds, const u8* w0, float* out0, u32 n0, const u8* w1, float* out1,
           u32 n1, const u8* w2, float* out2, u32 n2, const u8* w3, float* out3, u32 n3) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    // Shared memory: barriers, sums, the other block's sums, ring, activations, their sums.
    const u32 full = shared_address(shared), empty = full + 8 * RING, sums_full = empty + 8 * RING, sums_empty = sums_full + 8 * SUMS;
    const u32 cross = sums_empty + 8 * SUMS;
    u8* const sums = shared + 512;
    u8* const others = sums + SUMS * SUMS_BYTES;
    u8* const ring = others + (SPLIT > 1 ? MOST * BLOCKS * 512 : 0);

    Parts parts = {{w0, w1, w2, w3}, {out0, out1, out2, out3}, {n0, n1, n2, n3}, {}};
    u32 tiles = 0;
#pragma unroll
    for (int p = 0; p < 4; p++) parts.first[p] = tiles, tiles += (parts.n[p] + 15) / 16;
    const u32 rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    const u32 tile0 = cluster * tiles / clusters, run = (cluster + 1) * tiles / clusters - tile0;
    const u32 units = k / UNIT_INPUTS, class0 = rank * CLASSES;
    auto class_start = [&](u32 c) { return (class0 + c) * units / WARPS; };  // in units, from the start of a half tile

    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, CLASSES / cut);
        for (int i = 0; i < SUMS; i++) bar_init(sums_full + 8 * i, CLASSES), bar_init(sums_empty + 8 * i, 1);
        if (SPLIT > 1)
            for (int i = 0; i < MOST; i++) bar_init(cross + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    launch_next();

    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const u32 slots = run * cut;
    auto copy = [&](u32 s) {  // starts the copy of slot s of the run; by one thread
        const u32 tile = tile0 + s / cut, c = s % cut * (CLASSES / cut), slot = s % RING;
        const u8* from = parts.w[0];
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (tile >= parts.first[p]) from = parts.w[p] + (u64)(tile - parts.first[p]) * (units * UNIT_BYTES_ALL);
        const u32 start = class_start(c), bytes = (class_start(c + CLASSES / cut) - start) * UNIT_BYTES_ALL;
        bar_expect(full + 8 * slot, bytes);
        if (bytes) bulk_load(shared_address(ring + slot * slot_bytes), from + (u64)start * UNIT_BYTES_ALL, bytes, full + 8 * slot, policy);
    };
    if (lane == 0 && warp < min((u32)AHEAD, slots)) copy(warp);

    if (warp == WARPS) {
        for (u32 s = AHEAD; s < slots; s++) {
            bar_wait(full + 8 * ((s - AHEAD) % RING), (s - AHEAD) / RING & 1);
            if (s >= RING) bar_wait(empty + 8 * (s % RING), (s / RING & 1) ^ 1);
            if (lane == 0) copy(s);
        }
        __syncwarp();
        if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }

    const u32 g = lane / 4, t = lane % 4, c = warp % CLASSES, step = warp / CLASSES;
    const u32 start = class_start(c), count = (class_start(c + 1) - start) * (UNIT_INPUTS / 64);  // of units of 64 inputs
    const u32 before = (start - class_start(0)) * (UNIT_INPUTS / 64), in_block_units = (class_start(CLASSES) - class_start(0)) * (UNIT_INPUTS / 64);
    u8 *const xs = ring + RING * slot_bytes, *const my_x = xs + before * X_BYTES, *const my_totals = xs + in_block_units * X_BYTES + before * TOTAL_BYTES;
    wait();

    // Activations of the class: first row by row, 128 bytes of each, with their pieces of 16 permuted against conflicts ...
    const u32 x_at = shared_address(my_x);
    for (u32 unit = step; unit < count; unit += SPLIT)
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) {
            const u32 row = i * 4 + lane / 8, piece = lane % 8, to = x_at + unit * X_BYTES + row * 128 + (piece ^ row % 8) * 16;
            const u8* from = x + (u64)row * x_stride + (start * (UNIT_INPUTS / 64) + unit) * 128 + piece * 16;
            if (row < rows) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
            else asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
        }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    // ... then as fragments, scaled; and the sums of what shares a scale.
    for (u32 unit = step; unit < count; unit += SPLIT)
#pragma unroll
        for (int r = 0; r < BLOCKS; r++) {
            const u32 row = lane % 8, at = x_at + unit * X_BYTES + (r * 8 + row) * 128;
            uint4 v[2];
#pragma unroll
            for (int h = 0; h < 2; h++) v[h] = load_matrices(at + (h * 4 + lane / 8 ^ row) * 16);
            float total[SUBS][4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 &low = j % 2 ? v[j / 2].z : v[j / 2].x, &high = j % 2 ? v[j / 2].w : v[j / 2].y;
                low = mul_bf16x2(low, X_LOW), high = mul_bf16x2(high, X_HIGH);
                u32 a[4];
                ones(a);
                mma(total[j * SUBS / 4], a, low, high);
            }
            __syncwarp();
#pragma unroll
            for (int h = 0; h < 2; h++) ((uint4*)(my_x + unit * X_BYTES))[r * 64 + h * 32 + lane] = v[h];
            if (g == 0)
#pragma unroll
                for (int s = 0; s < SUBS; s++) ((float2*)(my_totals + unit * TOTAL_BYTES))[(r * SUBS + s) * 4 + t] = make_float2(total[s][0], total[s][1]);
        }
    __syncwarp();
    if (SPLIT > 1) asm volatile("bar.sync %0, %1;" ::"r"(1 + c), "n"(32 * SPLIT) : "memory");

    // Adds the classes of half tile i of the run and stores its outputs.
    auto finish = [&](u32 i) {
        const u32 tile = tile0 + i, buffer = i % SUMS;
        const bool mine = SPLIT == 1 || i % SPLIT == rank;
        u32 o = 0, n = 0;
        float* out = nullptr;
        bool add_old = false;
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (tile >= parts.first[p]) o = (tile - parts.first[p]) * 16 + g, n = parts.n[p], out = parts.out[p], add_old = adds >> p & 1;
        float old[BLOCKS][4];
        auto at = [&](int r, int e) {  // the lane's outputs; null if not there
            const u32 row = r * 8 + 2 * t + e % 2, output = o + e / 2 * 8;
            return mine && row < rows && output < n ? out + (u64)row * n + output : nullptr;
        };
        if (add_old)
#pragma unroll
            for (int r = 0; r < BLOCKS; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (at(r, e)) old[r][e] = *at(r, e);
        bar_wait(sums_full + 8 * buffer, i / SUMS & 1);
        float4 v[BLOCKS];
        const float4* from = (const float4*)(sums + buffer * SUMS_BYTES) + lane;
#pragma unroll
        for (int r = 0; r < BLOCKS; r++) {
            float4 part[CLASSES];
#pragma unroll
            for (int c = 0; c < CLASSES; c++) part[c] = from[(c * BLOCKS + r) * 32];
#pragma unroll
            for (int d = 1; d < CLASSES; d *= 2)
#pragma unroll
                for (int c = 0; c + d < CLASSES; c += 2 * d) part[c] = add(part[c], part[c + d]);
            v[r] = part[0];
        }
        __syncwarp();
        if (lane == 0) bar_arrive(sums_empty + 8 * buffer);
        if constexpr (SPLIT > 1) {
            const u32 to = shared_address(others) + (i * BLOCKS * 32 + lane) * 16, peer = rank ^ 1;
            if (!mine) {
#pragma unroll
                for (int r = 0; r < BLOCKS; r++)
                    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(in_block(to + r * 512, peer)), "f"(v[r].x), "f"(v[r].y), "f"(v[r].z),
                                 "f"(v[r].w) : "memory");
                __syncwarp();
                if (lane == 0) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(cross + 8 * i, peer)) : "memory");
                return;
            }
            asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@!p bra again;\n}\n" ::"r"(cross + 8 * i) : "memory");
#pragma unroll
            for (int r = 0; r < BLOCKS; r++) {
                const float4 other = ((const float4*)others)[(i * BLOCKS + r) * 32 + lane];
                v[r] = rank == 0 ? add(v[r], other) : add(other, v[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < BLOCKS; r++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float value = e == 0 ? v[r].x : e == 1 ? v[r].y : e == 2 ? v[r].z : v[r].w;
                if (at(r, e)) *at(r, e) = add_old ? fmaf(value, UNSCALE, old[r][e]) : value * UNSCALE;
            }
    };

    const u32 slot_of_tile = c / (CLASSES / cut), in_slot = (start - class_start(slot_of_tile * (CLASSES / cut))) * UNIT_BYTES_ALL;
    if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    u32 duty = run;  // a half tile that this warp has to finish
    for (u32 i = step; i < run; i += SPLIT) {
        const u32 s = i * cut + slot_of_tile, slot = s % RING, buffer = i % SUMS;
        const u8* at = ring + slot * slot_bytes + in_slot;
        float sum[BLOCKS][4] = {};
        bar_wait(full + 8 * slot, s / RING & 1);
        u32 u = 0;
        for (; u + 2 <= count; u += 2) {
            Unit w[2];
            float raw[2][SUBS][BLOCKS][4];
            load_unit(w[0], at, u, lane), load_unit(w[1], at, u + 1, lane);
            multiply(raw[0], w[0], my_x + u * X_BYTES, lane), multiply(raw[1], w[1], my_x + (u + 1) * X_BYTES, lane);
            accumulate(sum, raw[0], w[0], my_totals + u * TOTAL_BYTES, t), accumulate(sum, raw[1], w[1], my_totals + (u + 1) * TOTAL_BYTES, t);
        }
        if (u < count) {
            Unit w;
            float raw[SUBS][BLOCKS][4];
            load_unit(w, at, u, lane);
            multiply(raw, w, my_x + u * X_BYTES, lane);
            accumulate(sum, raw, w, my_totals + u * TOTAL_BYTES, t);
        }
        __syncwarp();
        if (lane == 0) bar_arrive(empty + 8 * slot);
        bar_wait(sums_empty + 8 * buffer, (i / SUMS & 1) ^ 1);
        float4* to = (float4*)(sums + buffer * SUMS_BYTES) + c * BLOCKS * 32 + lane;
#pragma unroll
        for (int r = 0; r < BLOCKS; r++) to[r * 32] = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        __syncwarp();
        if (lane == 0) bar_arrive(sums_full + 8 * buffer);
        if (duty < i) finish(duty), duty = run;  // a step late, so that the other sums are there
        if (i / SPLIT % CLASSES == c) duty = i;
    }
    if (duty < run) finish(duty);
}
#endif
