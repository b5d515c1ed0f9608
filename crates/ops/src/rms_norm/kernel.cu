// rms_norm: out = x * rsqrt(mean(x^2) + eps) * weight, row by row
// shapes   x (rows, WIDTH) f32; weight (WIDTH) f32; out (rows, WIDTH) bf16 or f32, STRIDE bytes a row
// launch   grid (rows), block THREADS: a row lies in its block's registers
// traffic  every element once
// source   definition: mod.rs reference(); row.cuh

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const float* x, const float* weight, char* out, float eps) {
    __shared__ float warps[32];
    launch_next();
    wait();
    rms_norm_row<THREADS, WIDTH, ACT_BF16>(x + (u64)blockIdx.x * WIDTH, weight, out + (u64)blockIdx.x * STRIDE, eps, warps);
}
