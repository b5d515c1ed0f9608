// block_conv: out_t[c] = sum over taps o of (base[o, c] + dyn[t, SIDE, o, c / GROUP]) * x_{t-o}[c], inside a lane
// shapes   x (rows, WIDTH) bf16 or f32, X_STRIDE bytes a row; dynamic (rows, 2, TAPS, WIDTH / GROUP) f32; base (TAPS, WIDTH) f32;
//          out (rows, WIDTH): activations of STRIDE bytes a row, or f32 that is added to
// launch   grid (rows, WIDTH / 1024), block 256: a thread makes four neighbours
// traffic  x once from memory, TAPS times from cache
// source   definition: mod.rs reference(); taps in ascending order, each a fused multiply-add

extern "C" __global__ void __launch_bounds__(256)
block_conv(const char* x, const float* dynamic, const float* base, const LaneStep* steps, u32 count, char* out) {
    launch_next();
    u32 row = blockIdx.x, c = 4 * (blockIdx.y * 256 + threadIdx.x);
    wait();
    u32 lane = lane_of(steps, count, row);
    if (lane == count || c >= WIDTH) return;
    u32 t = row - steps[lane].row0;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (u32 o = 0; o < TAPS; o++) {
        if (o > t) break;
        float dyn = dynamic[(((u64)row * 2 + SIDE) * TAPS + o) * (WIDTH / GROUP) + c / GROUP];
        float4 b = *(const float4*)(base + o * WIDTH + c);
        float4 v = act_load4<X_BF16>(x + (u64)(row - o) * X_STRIDE, c);
        sum.x = fmaf(__fadd_rn(b.x, dyn), v.x, sum.x);
        sum.y = fmaf(__fadd_rn(b.y, dyn), v.y, sum.y);
        sum.z = fmaf(__fadd_rn(b.z, dyn), v.z, sum.z);
        sum.w = fmaf(__fadd_rn(b.w, dyn), v.w, sum.w);
    }
#if ADD
    float4* to = (float4*)(out + ((u64)row * WIDTH + c) * 4);
    float4 old = *to;
    *to = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
#else
    act_store4<ACT_BF16>(out + (u64)row * STRIDE, c, sum);
#endif
}
