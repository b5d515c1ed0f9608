// linear of many rows: out[rows, n] (+)= x[rows, k] W[n, k]^T on the tensor cores of Hopper
// shapes   x bf16 rows; W in the order of fragments.rs; out f32; k a multiple of 64 and of the span
// launch   grid (rows / 128, outputs / 256 of each part): neighbours share weights; two warpgroups compute, one copies
// traffic  x once for each 256 outputs and weights once for each 128 rows, mostly from L2
// source   definition: mod.rs reference(), with weights rounded to bf16
//
// Weights are the first operand, from registers: each warp reads its half tiles straight from memory a unit ahead, makes bf16 of them
// while the tensor cores work on the unit before, and never shares them. Activations are the second operand, from shared memory.
//
// Defines: those of weight.cuh.

#define ROWS 128
#define OUTPUTS 256
#define STAGES 6
#define IN_FLIGHT 4  // stages on their way
#define STAGE_BYTES (ROWS * 128)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

// D (64 x 128, f32) += A (64 x 16, bf16, registers) B (16 x 128, bf16, shared memory); zeroes D first unless `more`.
__device__ __forceinline__ void wgmma(float (&d)[64], const u32 (&a)[4], u64 b, u32 more) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
// At most `N` groups of wgmma of this warpgroup are still running.
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// 128 rows of 64 inputs, 128 bytes each, pieces of 16 permuted: what wgmma calls a 128-byte swizzle.
__device__ __forceinline__ u64 describe(u32 at) { return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | at >> 4; }

// A of the four steps of a unit: bf16 weights.
__device__ __forceinline__ void weights_of_unit(u32 (&a)[4][4], const Unit& w) {
#pragma unroll
    for (int s = 0; s < SUBS; s++) {
        float scale[2], bias[2];
        scales(w, s, scale, bias);
#pragma unroll
        for (int o = 0; o < 2; o++) scale[o] *= 64.f;  // codes come out as code / 64, or code / 4 where they were shifted
        const u32 by[2] = {pack_bf16(scale[0], scale[0]), pack_bf16(scale[1], scale[1])};
        const u32 by_shifted[2] = {mul_bf16x2(by[0], 0x3d803d80u), mul_bf16x2(by[1], 0x3d803d80u)};  // 1 / 16
        const u32 plus[2] = {pack_bf16(bias[0], bias[0]), pack_bf16(bias[1], bias[1])};
#pragma unroll
        for (int j = s * 4 / SUBS; j < (s + 1) * 4 / SUBS; j++) {
            codes_of_step(a[j], w, j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool shifted = CODES == 0 && i >= 2;
                const u32 code = mul_bf16x2(a[j][i], 0x7f007f00u);  // times 2^127
                if constexpr (SCALE == 1 && !SYMMETRIC) {  // scale and bias are bf16: rounded once
                    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[j][i]) : "r"(code), "r"(shifted ? by_shifted[i % 2] : by[i % 2]), "r"(plus[i % 2]));
                } else {
                    const float f = shifted ? scale[i % 2] * 0.0625f : scale[i % 2];
                    a[j][i] = pack_bf16(fmaf(__uint_as_float(code << 16), f, bias[i % 2]), fmaf(__uint_as_float(code & 0xffff0000u), f, bias[i % 2]));
                }
            }
        }
    }
}
__device__ __forceinline__ void keep(u32 (&a)[4][4]) {  // they are made before, and stay as they are until here
#pragma unroll
    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
}

extern "C" __global__ void __launch_bounds__(384, 1)
linear_many(const u8* x, u32 x_stride, u32 rows, u32 k, u32 adds, const u8* w0, float* out0, u32 n0, const u8* w1, float* out1, u32 n1,
            const u8* w2, float* out2, u32 n2, const u8* w3, float* out3, u32 n3) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 base = (shared_address(shared) + 1023) / 1024 * 1024, full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const u32 units = k / 64, row0 = blockIdx.x * ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) bar_init(full + 8 * i, 128), bar_init(empty + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    wait();

    if (warp < 4) {  // copies activations
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (u32 u = 0; u < units + IN_FLIGHT - 1; u++) {
            if (u < units) {
                const u32 slot = u % STAGES;
                if (u >= STAGES) bar_wait(empty + 8 * slot, (u / STAGES & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const u32 row = i * 16 + threadIdx.x / 8, piece = threadIdx.x % 8;
                    const u8* from = x + (u64)min(row0 + row, rows - 1) * x_stride + u * 128 + piece * 16;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + slot * STAGE_BYTES + row * 128 + (piece ^ row % 8) * 16), "l"(from)
                                 : "memory");
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (u >= IN_FLIGHT - 1) {
                asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT - 1) : "memory");
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                bar_arrive(full + 8 * ((u - (IN_FLIGHT - 1)) % STAGES));
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

    float sum[2][64];
    u32 a[2][4][4];
    Unit unit[2];
#pragma unroll
    for (int h = 0; h < 2; h++) load_unit(unit[h], from[h], 0, lane);
    for (u32 u = 0; u < units; u++) {
        const u32 slot = u % STAGES;
        bar_wait(full + 8 * slot, u / STAGES & 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            wgmma_wait<1>();  // those that read a[h] before are done
            keep(a[h]);
            if (h == 1 && u > 0 && lane == 0) bar_arrive(empty + 8 * ((u - 1) % STAGES));
            weights_of_unit(a[h], unit[h]);
            if (u + 1 < units) load_unit(unit[h], from[h], u + 1, lane);
            keep(a[h]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int j = 0; j < 4; j++) wgmma(sum[h], a[h][j], describe(base + slot * STAGE_BYTES) + 2 * j, u > 0 || j > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
    }
    wgmma_wait<0>();
    keep(a[0]), keep(a[1]);

    const u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 o = (half0 + 4 * h) * 16 + g;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const u32 row = row0 + i / 4 * 8 + 2 * t + i % 2, output = o + i / 2 % 2 * 8;
            float* to = out + (u64)row * n + output;
            if (row < rows && output < n) *to = adds >> part & 1 ? *to + sum[h][i] : sum[h][i];
        }
    }
}
#endif
