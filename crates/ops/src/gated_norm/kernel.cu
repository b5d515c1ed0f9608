// gated_norm: per head out = x * rsqrt(mean(x^2) + eps) * weight * silu(gate)
// shapes   x, gate (rows, WIDTH) f32; weight (DIM) f32; out (rows, WIDTH) bf16 or f32, STRIDE bytes a row
// launch   grid (rows, heads / 4), block 128: a warp owns a head, VECS float4 a lane
// traffic  every element once
// source   definition: mod.rs reference(). A lane adds its squares in order, then a tree over lanes

extern "C" __global__ void __launch_bounds__(128)
gated_norm(const float* x, const float* gate, const float* weight, char* out, float eps) {
    launch_next();
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    u32 row = blockIdx.x, head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 v[VECS], g[VECS], w[VECS];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (32 * i + lane);
        w[i] = at < DIM ? *(const float4*)(weight + at) : zero;
    }
    wait();
    if (head >= WIDTH / DIM) return;
    u64 first = (u64)row * WIDTH + head * DIM;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (32 * i + lane);
        v[i] = at < DIM ? *(const float4*)(x + first + at) : zero;
        g[i] = at < DIM ? *(const float4*)(gate + first + at) : zero;
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        squares = fmaf(v[i].x, v[i].x, squares);
        squares = fmaf(v[i].y, v[i].y, squares);
        squares = fmaf(v[i].z, v[i].z, squares);
        squares = fmaf(v[i].w, v[i].w, squares);
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / DIM + eps);
    char* to = out + (u64)row * STRIDE;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (32 * i + lane);
        float4 y = make_float4(v[i].x * scale * w[i].x * silu(g[i].x), v[i].y * scale * w[i].y * silu(g[i].y),
                               v[i].z * scale * w[i].z * silu(g[i].z), v[i].w * scale * w[i].w * silu(g[i].w));
        if (at < DIM) act_store4<ACT_BF16>(to, head * DIM + at, y);
    }
}
