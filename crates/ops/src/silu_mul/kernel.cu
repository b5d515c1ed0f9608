// silu_mul: out = silu(gate) * up
// shapes   gate, up (rows, WIDTH) f32; out (rows, WIDTH) bf16 or f32, STRIDE bytes a row
// launch   grid (rows, WIDTH / 1024), block 256: a thread makes four neighbours
// traffic  every element once
// source   definition: mod.rs reference()

extern "C" __global__ void __launch_bounds__(256)
silu_mul(const float* gate, const float* up, char* out) {
    launch_next();
    u32 row = blockIdx.x, i = 4 * (blockIdx.y * 256 + threadIdx.x);
    wait();
    if (i >= WIDTH) return;
    u64 at = (u64)row * WIDTH + i;
    float4 g = *(const float4*)(gate + at), u = *(const float4*)(up + at);
    float4 y = make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
    act_store4<ACT_BF16>(out + (u64)row * STRIDE, i, y);
}
