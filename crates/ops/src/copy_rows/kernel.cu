// copy_rows: to[r, COLUMN .. COLUMN + WIDTH] = from[r]
// shapes   from (rows, WIDTH) f32; to (rows, wider) bf16 or f32, STRIDE bytes a row
// launch   grid (rows, WIDTH / (VEC * 256)), block 256: a thread moves VEC neighbours
// traffic  every element once
// source   definition: mod.rs reference()

extern "C" __global__ void __launch_bounds__(256) copy_rows(const float* from, char* to) {
    launch_next();
    u32 row = blockIdx.x, i = (blockIdx.y * 256 + threadIdx.x) * VEC;
    wait();
    if (i >= WIDTH) return;
    const float* source = from + (u64)row * WIDTH + i;
    char* target = to + (u64)row * STRIDE;
#if VEC == 4
    act_store4<ACT_BF16>(target, COLUMN + i, *(const float4*)source);
#else
    act_store<ACT_BF16>(target, COLUMN + i, *source);
#endif
}
