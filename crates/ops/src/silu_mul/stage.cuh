// silu_mul as a stage of a chain, four neighbours a thread at a time. Words: gate, up, out, width, bytes of a row of out, rows.

// What a thread reads before it computes: with many rows, it would wait for each piece by itself.
#define SILU_PIECES (COMPUTERS > WARPS ? 4 : 1)

__device__ __forceinline__ void silu_mul_stage(const u64* word, u32 warp, u32 lane) {
    const u32 quads = (u32)word[3] / 4, all = quads * (u32)word[5], apart = gridDim.x * 32 * COMPUTERS;
#pragma unroll 1
    for (u32 first = (blockIdx.x * COMPUTERS + warp) * 32; first < all; first += SILU_PIECES * apart) {
        float4 g[SILU_PIECES], u[SILU_PIECES];
#pragma unroll
        for (int j = 0; j < SILU_PIECES; j++) {
            const u32 i = min(first + j * apart + lane, all - 1);
            g[j] = __ldcg((const float4*)word[0] + i), u[j] = __ldcg((const float4*)word[1] + i);
        }
#pragma unroll
        for (int j = 0; j < SILU_PIECES; j++) {
            const u32 i = first + j * apart + lane, row = i / quads, at = i % quads * 4;
            const float4 y = make_float4(silu(g[j].x) * u[j].x, silu(g[j].y) * u[j].y, silu(g[j].z) * u[j].z, silu(g[j].w) * u[j].w);
            if (i < all) act_store4<1>((u8*)word[2] + row * word[4], at, y);
        }
    }
}
