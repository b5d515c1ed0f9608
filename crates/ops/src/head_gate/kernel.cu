// head_gate: out = x * sigmoid(gate), or out = x without a gate
// shapes   x (rows, WIDTH) f32; q_gate (rows, WIDTH / DIM, 2, DIM) f32, the second half gates; out (rows, WIDTH), STRIDE bytes a row
// launch   grid (rows, WIDTH / 1024), block 256: a thread makes four neighbours
// traffic  every element once
// source   definition: mod.rs reference()

extern "C" __global__ void __launch_bounds__(256)
head_gate(const float* x, const float* q_gate, char* out) {
    launch_next();
    u32 row = blockIdx.x, i = 4 * (blockIdx.y * 256 + threadIdx.x);
    wait();
    if (i >= WIDTH) return;
    float4 y = *(const float4*)(x + (u64)row * WIDTH + i);
#if GATED
    const float* gates = q_gate + (u64)row * 2 * WIDTH;
    float4 g = *(const float4*)(gates + (2 * (i / DIM) + 1) * DIM + i % DIM);
    y.x /= 1.0f + expf(-g.x);
    y.y /= 1.0f + expf(-g.y);
    y.z /= 1.0f + expf(-g.z);
    y.w /= 1.0f + expf(-g.w);
#endif
    act_store4<ACT_BF16>(out + (u64)row * STRIDE, i, y);
}
