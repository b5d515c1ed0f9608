// rms_norm: out = x * rsqrt(mean(x^2) + eps) * weight, row by row
// shapes   x (rows, WIDTH) f32; weight (WIDTH) f32; out (rows, WIDTH) bf16 or f32, STRIDE bytes a row
// launch   grid (rows), block THREADS: a row lies in its block's registers, VECS float4 a thread
// traffic  every element once
// source   definition: mod.rs reference(). A thread adds its squares in order, then a tree over lanes, then warps

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const float* x, const float* weight, char* out, float eps) {
    launch_next();
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 v[VECS], w[VECS];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (i * THREADS + threadIdx.x);
        w[i] = at < WIDTH ? *(const float4*)(weight + at) : zero;
    }
    wait();
    const float* row = x + (u64)blockIdx.x * WIDTH;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (i * THREADS + threadIdx.x);
        v[i] = at < WIDTH ? *(const float4*)(row + at) : zero;
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        squares = fmaf(v[i].x, v[i].x, squares);
        squares = fmaf(v[i].y, v[i].y, squares);
        squares = fmaf(v[i].z, v[i].z, squares);
        squares = fmaf(v[i].w, v[i].w, squares);
    }
    squares = warp_sum(squares);
    __shared__ float warps[32];
    u32 lane = threadIdx.x % 32;
    if (lane == 0) warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = warp_sum(lane < THREADS / 32 ? warps[lane] : 0.0f);
    float scale = 1.0f / sqrtf(squares / WIDTH + eps);
    char* to = out + (u64)blockIdx.x * STRIDE;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (i * THREADS + threadIdx.x);
        if (at < WIDTH)
            act_store4<ACT_BF16>(to, at, make_float4(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y,
                                                     v[i].z * scale * w[i].z, v[i].w * scale * w[i].w));
    }
}
