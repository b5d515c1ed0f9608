// Inputs of wide.cuh as its matrix instructions want them: a panel for each 64 inputs, WIDE rows of 128 bytes swizzled as in wgmma.cuh;
// rows that are not there are zeros. Eight rows of a panel a warp. Words: x bf16 rows, bytes of a row, rows, k, panels.
#define PANEL_BYTES (WIDE * 128)

__device__ __forceinline__ void panels_stage(const u64* word, u32 warp, u32 lane) {
    const u32 rows = word[2], units = (u32)word[3] / 64, g = lane / 4, t = lane % 4;
    for (u32 i = blockIdx.x + warp * gridDim.x; i < units * (WIDE / 8); i += gridDim.x * COMPUTERS) {
        const u32 unit = i / (WIDE / 8), row = i % (WIDE / 8) * 8 + g;
        const uint4* from = (const uint4*)((const u8*)word[0] + (u64)row * word[1] + unit * 128) + t;
        u8* panel = (u8*)word[4] + unit * PANEL_BYTES;
        const uint4 none = make_uint4(0, 0, 0, 0);
        const uint4 x[2] = {row < rows ? __ldcg(from) : none, row < rows ? __ldcg(from + 4) : none};
#pragma unroll
        for (int p = 0; p < 2; p++) *(uint4*)(panel + panel_at(row, t + 4 * p)) = x[p];
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine reads them
}
