// Inputs of wide.cuh as its matrix instructions want them: a panel for each 64 inputs, WIDE rows of 128 bytes swizzled as in wgmma.cuh
// and scaled for fragments.cuh, rows that are not there zeros; and behind all panels, for each 64 inputs, the sums of each row's parts
// that share a scale, [SUBS, WIDE] f32. Eight rows of a panel a warp. Words: x bf16 rows, bytes of a row, rows, k, panels.
#define PANEL_BYTES (WIDE * 128)
#define TOTALS_BYTES (SUBS * WIDE * 4)

__device__ __forceinline__ void panels_stage(const u64* word, u32 warp, u32 lane) {
    const u32 rows = word[2], units = (u32)word[3] / 64, g = lane / 4, t = lane % 4;
    for (u32 i = blockIdx.x + warp * gridDim.x; i < units * (WIDE / 8); i += gridDim.x * COMPUTERS) {
        const u32 unit = i / (WIDE / 8), row0 = i % (WIDE / 8) * 8, row = row0 + g;
        const u32* from = (const u32*)((const u8*)word[0] + (u64)row * word[1] + unit * 128) + t;
        u8* panel = (u8*)word[4] + unit * PANEL_BYTES;
        float total[SUBS][4] = {};
        u32 x[8], a[4];
#pragma unroll
        for (int p = 0; p < 8; p++) x[p] = row < rows ? __ldcg(from + 4 * p) : 0;
        ones(a);
#pragma unroll
        for (int p = 0; p < 8; p++) {
            x[p] = mul_bf16x2(x[p], p % 2 ? X_HIGH : X_LOW);
            *(u32*)(panel + panel_at(row, p) + 4 * t) = x[p];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) mma(total[j * SUBS / 4], a, x[2 * j], x[2 * j + 1]);
#pragma unroll
        for (int s = 0; s < SUBS; s++)
            if (g == 0)
                *(float2*)((u8*)word[4] + units * PANEL_BYTES + unit * TOTALS_BYTES + (s * WIDE + row0 + 2 * t) * 4) = make_float2(total[s][0], total[s][1]);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine reads them
}
