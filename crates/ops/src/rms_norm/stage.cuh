// rms_norm as a stage of a chain, a row a block. Words: x, weight, out, eps, bytes of a row of out, rows.

// The first row of this block. The last blocks have the first rows, since the first ones may have a mixer to begin.
__device__ __forceinline__ u32 first_norm_row() {
    return gridDim.x - 1 - blockIdx.x;
}

__device__ __forceinline__ void rms_norm_stage(const u64* word) {
    __shared__ float warps[WARPS];
    const float* x = (const float*)word[0];
    for (u32 row = first_norm_row(); row < (u32)word[5]; row += gridDim.x) {
        rms_norm_row<32 * WARPS, NORM_WIDTH, 1>(x + (u64)row * NORM_WIDTH, (const float*)word[1], (u8*)word[2] + row * word[4],
                                                __uint_as_float(word[3]), warps);
        barrier(1, 32 * WARPS);
    }
}
