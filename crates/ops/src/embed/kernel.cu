// embed: out[r] = table[min(ids[r], n - 1)], dequantised: scale * code + bias, or scale * (code - ZERO)
// shapes   ids (rows) u32; table: a dense row-major matrix, or tiles in the order of linear/fragments.rs; out (rows, k) f32
// launch   grid (rows, k / 1024), block 256: a thread makes four neighbours
// traffic  one row of the table and of the output for each row
// source   definition: mod.rs reference(); product and sum are rounded apart, as there
//
// Defines: those of linear/weight.cuh, and FORMAT: 0 quantised, 1 f32, 2 f16, 3 bf16

__device__ __forceinline__ float element(const u8* table, u32 k, u32 id, u32 i) {
    if constexpr (FORMAT == 0) return quantised_weight(table, k, id, i);
    const u64 at = (u64)id * k + i;
    if constexpr (FORMAT == 1) return ((const float*)table)[at];
    else if constexpr (FORMAT == 2) return f16_to_f32(((const u16*)table)[at]);
    else return bf16_to_f32(((const u16*)table)[at]);
}

extern "C" __global__ void __launch_bounds__(256)
embed(const u32* ids, const u8* table, float* out, u32 n, u32 k) {
    const u32 row = blockIdx.x, i = 4 * (blockIdx.y * 256 + threadIdx.x);
    // In this order: a pass begins here, and what was there before it is complete for all of its launches.
    wait();
    launch_next();
    if (i >= k) return;
    const u32 id = min(ids[row], n - 1);
    float* to = out + (u64)row * k + i;
#pragma unroll
    for (u32 e = 0; e < 4; e++)
        if (i + e < k) to[e] = element(table, k, id, i + e);
}
