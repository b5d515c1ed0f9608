// copy_rows as a stage of a chain, four neighbours a thread. Words: from, to, width, column, bytes of a row of to, rows.
__device__ __forceinline__ void copy_rows_stage(const u64* word) {
    const u32 quads = (u32)word[2] / 4, all = quads * (u32)word[5];
    for (u32 i = blockIdx.x * 32 * WARPS + threadIdx.x; i < all; i += gridDim.x * 32 * WARPS) {
        const u32 row = i / quads, at = i % quads * 4;
        act_store4<1>((u8*)word[1] + row * word[4], (u32)word[3] + at, ((const float4*)word[0])[i]);
    }
}
