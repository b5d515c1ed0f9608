// linear of many of a prompt's rows: out[rows, n] (+)= x[rows, k] W[n, k]^T on the tensor cores of Hopper
// shapes   x bf16 rows; W in the order of fragments.rs; out f32; k a multiple of 64 and of the span
// launch   grid (rows / ROWS, outputs / OUTPUTS of each part): neighbours share weights; two warpgroups compute, one copies
// traffic  x once for each OUTPUTS outputs and weights once for each ROWS rows, mostly from L2
// source   definition: mod.rs reference(), with weights rounded to bf16
//
// Weights are the first operand, from registers: each warp reads its half tiles straight from memory a unit ahead, makes bf16 of
// them while the tensor cores work on those before, and never shares them. Activations are the second operand, from shared memory.
//
// Sums. An output is one accumulator of the tensor cores, from 0, to which each 16 inputs are added in ascending order; `add` comes
// last. Nothing of that depends on the rows of the pass or on where a row lies: each has the same bits alone. short.cu has them too.
//
// Defines: those of weight.cuh.

#define ROWS 160
#define OUTPUTS 256
#define STAGES 6
#define IN_FLIGHT 4  // stages on their way
#define STAGE_BYTES (ROWS * 128)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __global__ void __launch_bounds__(384, 1)
linear_many(const u8* x, u32 x_stride, u32 rows, u32 k, u32 adds, const u8* w0, float* out0, u32 n0, const u8* w1, float* out1, u32 n1,
            const u8* w2, float* out2, u32 n2, const u8* w3, float* out3, u32 n3) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 base = (shared_address(shared) + 1023) / 1024 * 1024, full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const u32 units = k / 64, row0 = blockIdx.x * ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) phase_init(full + 8 * i, 128), phase_init(empty + 8 * i, 8);
        phase_init_fence();
    }
    __syncthreads();
    launch_next();
    wait();

    if (warp < 4) {  // copies activations
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (u32 u = 0; u < units + IN_FLIGHT - 1; u++) {
            if (u < units) {
                const u32 slot = u % STAGES;
                if (u >= STAGES) phase_wait(empty + 8 * slot, (u / STAGES & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < ROWS / 16; i++) {
                    const u32 row = i * 16 + threadIdx.x / 8, piece = threadIdx.x % 8;
                    const u8* from = x + (u64)min(row0 + row, rows - 1) * x_stride + u * 128 + piece * 16;
                    copy16(base + slot * STAGE_BYTES + panel_at(row, piece), from, 16);
                }
            }
            copies_commit();
            if (u >= IN_FLIGHT - 1) {
                copies_wait<IN_FLIGHT - 1>();
                fence_shared_async();
                phase_arrive(full + 8 * ((u - (IN_FLIGHT - 1)) % STAGES));
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

    // The part of this block, and its first output there.
    const u8* w = w0;
    float* out = out0;
    u32 n = n0, tile = blockIdx.y, part = 0;
    const u32 tiles0 = (n0 + OUTPUTS - 1) / OUTPUTS, tiles1 = (n1 + OUTPUTS - 1) / OUTPUTS, tiles2 = (n2 + OUTPUTS - 1) / OUTPUTS;
    if (tile >= tiles0) tile -= tiles0, w = w1, out = out1, n = n1, part = 1;
    if (part == 1 && tile >= tiles1) tile -= tiles1, w = w2, out = out2, n = n2, part = 2;
    if (part == 2 && tile >= tiles2) tile -= tiles2, w = w3, out = out3, n = n3, part = 3;
    // Each warpgroup has two rows of four half tiles, one for each of its warps. Half tiles past the end repeat the last one.
    const u32 group = warp / 4 - 1, half0 = tile * (OUTPUTS / 16) + group * 8 + warp % 4, last = (n + 31) / 32 * 2 - 1;
    const u8* from[2];
#pragma unroll
    for (int h = 0; h < 2; h++) from[h] = w + (u64)min(half0 + 4 * h, last) * (k / SPAN * SPAN_BYTES);

    float sum[2][ROWS / 2];
    u32 a[2][4][4];
    Unit unit[2];
#pragma unroll
    for (int h = 0; h < 2; h++) load_unit(unit[h], from[h], 0, lane);
    for (u32 u = 0; u < units; u++) {
        const u32 slot = u % STAGES;
        phase_wait(full + 8 * slot, u / STAGES & 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32(&operand)[4][4] = a[h];
            wgmma_wait<1>();  // those that read this operand before are done
            keep(operand);
            if (h == 1 && u > 0 && lane == 0) phase_arrive(empty + 8 * ((u - 1) % STAGES));
            weights_of_unit(operand, unit[h]);
            if (u + 1 < units) load_unit(unit[h], from[h], u + 1, lane);
            keep(operand);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) wgmma(sum[h], operand[j], rows_along(base + slot * STAGE_BYTES + 32 * j), u > 0 || j > 0);
            wgmma_commit();
        }
    }
    wgmma_wait<0>();
    keep(a[0]), keep(a[1]), keep(sum[0]), keep(sum[1]);

    const u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 o = (half0 + 4 * h) * 16 + g;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const u32 row = row0 + i / 4 * 8 + 2 * t + i % 2, output = o + i / 2 % 2 * 8;
            float* to = out + (u64)row * n + output;
            const float value = sum[h][i] * WEIGHTS_UNSCALE;
            if (row < rows && output < n) *to = adds >> part & 1 ? *to + value : value;
        }
    }
}
#endif
