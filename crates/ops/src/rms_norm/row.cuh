// One row of rms_norm by BLOCK threads of a block, in whose registers it lies, VECS float4 each. A thread adds its squares in
// order, then a tree over lanes, then warps. `warps`: shared memory for one float a warp.
template <int BLOCK, int ROW, int BF16>
__device__ __forceinline__ void rms_norm_row(const float* row, const float* weight, void* to, float eps, float* warps) {
    constexpr int VECS = (ROW / 4 + BLOCK - 1) / BLOCK;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 v[VECS], w[VECS];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (i * BLOCK + threadIdx.x);
        v[i] = at < ROW ? *(const float4*)(row + at) : zero;
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (i * BLOCK + threadIdx.x);
        w[i] = at < ROW ? *(const float4*)(weight + at) : zero;
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        squares = fmaf(v[i].x, v[i].x, squares);
        squares = fmaf(v[i].y, v[i].y, squares);
        squares = fmaf(v[i].z, v[i].z, squares);
        squares = fmaf(v[i].w, v[i].w, squares);
    }
    squares = warp_sum(squares);
    u32 lane = threadIdx.x % 32;
    if (lane == 0) warps[threadIdx.x / 32] = squares;
    barrier(1, BLOCK);
    squares = warp_sum(lane < BLOCK / 32 ? warps[lane] : 0.0f);
    float scale = 1.0f / sqrtf(squares / ROW + eps);
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 at = 4 * (i * BLOCK + threadIdx.x);
        if (at < ROW)
            act_store4<BF16>(to, at, make_float4(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y, v[i].z * scale * w[i].z, v[i].w * scale * w[i].w));
    }
}
