// linear of few of a prompt's rows: out[rows, n] (+)= x[rows, k] W[n, k]^T on the tensor cores of Hopper
// shapes   x bf16 rows; W in the order of fragments.rs; out f32; k a multiple of 64 and of the span
// launch   blocks take tiles of ROWS rows and OUTPUTS outputs in turns; GROUPS warpgroups compute, one copies
// traffic  x once for each OUTPUTS outputs and weights once for each ROWS rows, mostly from L2
// source   definition: mod.rs reference(), with weights rounded to bf16
//
// Weights are the first operand, from registers: a warp takes the codes of its half tile from a ring in shared memory and makes bf16
// of them while the tensor cores work on those before. Activations are the second operand, from the same ring. The copying warps
// don't stop where a tile ends, and weights are on their way before the launch before this one is complete.
//
// A stage is four units of 64 inputs: barriers once for so much work, and code between them that the compiler may order. It may be
// filled again only when its products are done, so it is left a little after the next one was begun.
//
// Sums. As in many.cu: an output is one accumulator of the tensor cores, from 0, to which each 16 inputs are added in ascending order;
// `add` comes last. Nothing of that depends on ROWS or GROUPS, on the rows of the pass, or on where a row lies.
//
// Defines: those of weight.cuh; ROWS of a tile; GROUPS; STAGES of the ring.

#define OUTPUTS (64 * GROUPS)
#define HALF_TILES (OUTPUTS / 16)
#define UNITS 4  // of a stage
#define PANEL_BYTES (ROWS * 128)
#define W_HALF_BYTES (SPAN < 64 ? UNITS * HEADERS * SPAN_BYTES : UNITS * 64 / SPAN * SPAN_BYTES)  // of a half tile's stage
#define COPIERS 128
#define THREADS (COPIERS + 128 * GROUPS)
#define REGISTERS (65536 / THREADS / 8 * 8)  // of a thread, before those that copy give theirs away
#define COPIERS_REGISTERS 32
#define BUFFERS (GROUPS == 4 ? 1 : 2)  // of operands, as registers allow

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What of a launch's outputs a tile has.
struct Part {
    const u8* w;
    float* out;
    u32 n, tile, add;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
linear_short(const u8* x, u32 x_stride, u32 rows, u32 k, u32 adds, const u8* w0, float* out0, u32 n0, const u8* w1, float* out1, u32 n1,
             const u8* w2, float* out2, u32 n2, const u8* w3, float* out3, u32 n3) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 base = (shared_address(shared) + 1023) / 1024 * 1024, weights = STAGES * UNITS * PANEL_BYTES;
    const u32 full = base + weights + STAGES * HALF_TILES * W_HALF_BYTES, empty = full + 8 * STAGES;
    const u32 units = k / 64, row_tiles = (rows + ROWS - 1) / ROWS, half_bytes = k / SPAN * SPAN_BYTES;
    const u32 tiles0 = (n0 + OUTPUTS - 1) / OUTPUTS, tiles1 = (n1 + OUTPUTS - 1) / OUTPUTS, tiles2 = (n2 + OUTPUTS - 1) / OUTPUTS;
    const u32 tiles = row_tiles * (tiles0 + tiles1 + tiles2 + (n3 + OUTPUTS - 1) / OUTPUTS);
    // Neighbours share weights.
    auto part_of = [&](u32 tile) {
        Part p = {w0, out0, n0, tile / row_tiles, adds & 1};
        if (p.tile >= tiles0) {
            p = {w1, out1, n1, p.tile - tiles0, adds >> 1 & 1};
            if (p.tile >= tiles1) {
                p = {w2, out2, n2, p.tile - tiles1, adds >> 2 & 1};
                if (p.tile >= tiles2) p = {w3, out3, n3, p.tile - tiles2, adds >> 3 & 1};
            }
        }
        return p;
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) phase_init(full + 8 * i, COPIERS + 1), phase_init(empty + 8 * i, 4 * GROUPS);
        phase_init_fence();
    }
    __syncthreads();
    launch_next();
    u32 slot = 0, parity = 0;
    auto advance = [&] {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    };

    if (warp < COPIERS / 32) {
#if GROUPS > 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPIERS_REGISTERS));
#endif
        // Weights: a lane for each half tile; those past the end repeat the last one.
        auto weights_from = [&](u32 tile) {
            const Part p = part_of(tile);
            return p.w + (u64)min(p.tile * HALF_TILES + lane, (p.n + 31) / 32 * 2 - 1) * half_bytes;
        };
        auto copy_weights = [&](u32 slot, const u8* from, u32 at) {
            const u32 bytes = min(W_HALF_BYTES, half_bytes - at);
            if (lane == 0) phase_arrive_expecting(full + 8 * slot, HALF_TILES * bytes);
            __syncwarp();
            if (lane < HALF_TILES) bulk_copy(base + weights + (slot * HALF_TILES + lane) * W_HALF_BYTES, from + at, bytes, full + 8 * slot);
        };
        const u32 early = min(STAGES, (units + UNITS - 1) / UNITS);
        if (warp == 0 && blockIdx.x < tiles)
            for (u32 i = 0; i < early; i++) copy_weights(i, weights_from(blockIdx.x), i * W_HALF_BYTES);
        wait();
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const u32 row0 = tile % row_tiles * ROWS, there = min(rows - row0, ROWS), row = threadIdx.x / 8, piece = threadIdx.x % 8;
            const u8 *from = x + (u64)(row0 + row) * x_stride + piece * 16, *w = weights_from(tile);
            for (u32 first = 0; first < units; first += UNITS, advance()) {
                phase_wait(empty + 8 * slot, parity ^ 1);
                if (warp == 0 && (tile != blockIdx.x || first >= early * UNITS)) copy_weights(slot, w, first / UNITS * W_HALF_BYTES);
                for (u32 u = first; u < min(first + UNITS, units); u++, from += 128) {
                    const u32 to = base + (slot * UNITS + u - first) * PANEL_BYTES + panel_at(row, piece);
#pragma unroll
                    for (u32 i = 0; i < ROWS; i += COPIERS / 8) copy16(to + i * 128, from + (u64)i * x_stride, row + i < there ? 16 : 0);
                }
                phase_arrive_copied(full + 8 * slot);
            }
        }
        return;
    }
#if GROUPS > 1
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS + (REGISTERS - COPIERS_REGISTERS) / GROUPS / 8 * 8));
#endif
    wait();

    const u32 half = warp - 4;  // tile of the block's
    float sum[ROWS / 2];
    u32 a[BUFFERS][4][4];
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (u32 first = 0; first < units; first += UNITS, advance()) {
            phase_wait(full + 8 * slot, parity);
            fence_shared_async();
            const u8* codes = shared + (base - shared_address(shared)) + weights + (slot * HALF_TILES + half) * W_HALF_BYTES;
            const u64 panel = rows_along(base + slot * UNITS * PANEL_BYTES);
            auto multiply = [&](u32(&operand)[4][4], int d) {
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) wgmma(sum, operand[j], panel + (d * PANEL_BYTES + 32 * j) / 16, first > 0 || d > 0 || j > 0);
                wgmma_commit();
            };
            auto leave_before = [&] {
                if (first > 0 && lane == 0) phase_arrive(empty + 8 * ((slot == 0 ? STAGES : slot) - 1));
            };
            if (first + UNITS <= units) {
                Unit unit[2];
                load_unit(unit[0], codes, 0, lane);
#pragma unroll
                for (int d = 0; d < UNITS; d++) {
                    if (d + 1 < UNITS) load_unit(unit[(d + 1) % 2], codes, d + 1, lane);
                    wgmma_wait<BUFFERS - 1>();  // those that read this operand before are done
                    keep(a[d % BUFFERS]);
                    if (d == BUFFERS - 1) leave_before();
                    weights_of_unit(a[d % BUFFERS], unit[d % 2]);
                    keep(a[d % BUFFERS]);
                    multiply(a[d % BUFFERS], d);
                }
            } else {
                wgmma_wait<0>();
                keep(a[0]), keep(a[BUFFERS - 1]);
                leave_before();
                for (u32 d = 0; first + d < units; d++) {
                    Unit unit;
                    load_unit(unit, codes, d, lane);
                    weights_of_unit(a[0], unit);
                    keep(a[0]);
                    multiply(a[0], d);
                    wgmma_wait<0>();
                    keep(a[0]);
                }
            }
        }
        wgmma_wait<0>();
        keep(a[0]), keep(a[BUFFERS - 1]), keep(sum);
        if (lane == 0) phase_arrive(empty + 8 * ((slot == 0 ? STAGES : slot) - 1));

        const Part p = part_of(tile);
        const u32 t = lane % 4, row0 = tile % row_tiles * ROWS, o = (p.tile * HALF_TILES + half) * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const u32 row = row0 + i / 4 * 8 + 2 * t + i % 2, output = o + i / 2 % 2 * 8;
            float* to = p.out + (u64)row * p.n + output;
            const float value = sum[i] * WEIGHTS_UNSCALE;
            if (row < rows && output < p.n) *to = p.add ? *to + value : value;
        }
    }
}
#endif
