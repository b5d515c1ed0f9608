// linear of any format, shape and activations: out[rows, n] (+)= x[rows, k] W[n, k]^T, the slow and general way
// shapes   as mod.rs has them; quantised W in the order of fragments.rs
// launch   grid (n / 8, rows / 8), block 256: a warp makes one output of 8 rows
// traffic  weights once for each 8 rows
// source   definition: mod.rs reference(); f32 sums, a lane's inputs in ascending order, then over the lanes
//
// Defines: those of weight.cuh, and
//   FORMAT    0 quantised, 1 f32, 2 f16, 3 bf16
//   ACT_BF16  activations are bf16, not f32
//   VECTOR    inputs that a lane takes at a time: 8, or 1 where k or an address is odd

__device__ __forceinline__ float dense_weight(const u8* row, u32 i) {
    if constexpr (FORMAT == 1) return ((const float*)row)[i];
    else if constexpr (FORMAT == 2) return f16_to_f32(((const u16*)row)[i]);
    else return bf16_to_f32(((const u16*)row)[i]);
}
__device__ __forceinline__ void halves(float (&to)[8], uint4 from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u16 bits = (u16)(words[i / 2] >> (16 * (i % 2)));
        to[i] = FORMAT == 2 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
}

extern "C" __global__ void __launch_bounds__(256)
linear_any(const u8* x, u32 x_stride, u32 rows, u32 n, u32 k, u32 add, const u8* w, float* out) {
    const u32 o = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, row0 = blockIdx.y * 8, count = min(8u, rows - row0);
    launch_next();
    wait();
    if (o >= n) return;
    x += (u64)row0 * x_stride;
    float sum[8] = {};
    for (u32 i = lane * VECTOR; i < k; i += 32 * VECTOR) {
        float v[8];
        if constexpr (FORMAT == 0) {
#pragma unroll
            for (int e = 0; e < VECTOR; e++) v[e] = quantised_weight(w, k, o, i + e);
        } else if constexpr (VECTOR == 8 && FORMAT >= 2) {
            halves(v, *(const uint4*)(w + ((u64)o * k + i) * 2));
        } else {
#pragma unroll
            for (int e = 0; e < VECTOR; e++) v[e] = dense_weight(w + (u64)o * k * (FORMAT == 1 ? 4 : 2), i + e);
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
            if (r >= count) break;
            const u8* row = x + (u64)r * x_stride;
            if constexpr (VECTOR == 8) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float4 f = act_load4<ACT_BF16>(row, i + 4 * h);
                    sum[r] = fmaf(f.x, v[4 * h], sum[r]), sum[r] = fmaf(f.y, v[4 * h + 1], sum[r]);
                    sum[r] = fmaf(f.z, v[4 * h + 2], sum[r]), sum[r] = fmaf(f.w, v[4 * h + 3], sum[r]);
                }
            } else {
                sum[r] = fmaf(act_load<ACT_BF16>(row, i), v[0], sum[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float total = warp_sum(sum[r]);
        float* to = out + (u64)(row0 + r) * n + o;
        if (lane == 0 && r < count) *to = add ? *to + total : total;
    }
}
