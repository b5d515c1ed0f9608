// silu_mul as a stage of a chain, four neighbours a thread. Words: gate, up, out, width, bytes of a row of out, rows.
__device__ __forceinline__ void silu_mul_stage(const u64* word) {
    const u32 quads = (u32)word[3] / 4, all = quads * (u32)word[5];
    for (u32 i = blockIdx.x * 32 * WARPS + threadIdx.x; i < all; i += gridDim.x * 32 * WARPS) {
        const u32 row = i / quads, at = i % quads * 4;
        const float4 g = ((const float4*)word[0])[i], u = ((const float4*)word[1])[i];
        act_store4<1>((u8*)word[2] + row * word[4], at, make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w));
    }
}
