// attn_prepare: per head norm and rotation of queries and keys; keys and values into their pages as bf16
// shapes   q (rows, q_heads, q_stride) f32; q_out (rows, q_heads, DIM) f32; k, v (rows, kv_heads, DIM) f32;
//          pages as `KvPool` in step.rs has them
// launch   grid (rows, (q_heads + 2 kv_heads) / 4), block 128: a warp owns a head of q, k or v; the head lies in shared memory
// traffic  every element once
// source   definition: mod.rs reference(). A lane adds its squares in order, then a tree over lanes

// Norms x where there is a norm, and turns the pairs of its first elements.
__device__ __forceinline__ void norm_and_turn(float* x, const float* norm, const float* inv_freq, u32 pairs, u32 adjacent,
                                              u32 pos, float eps) {
    u32 lane = threadIdx.x % 32;
    if (norm) {
        float squares = 0.0f;
        for (u32 i = lane; i < DIM; i += 32) squares = fmaf(x[i], x[i], squares);
        float scale = 1.0f / sqrtf(warp_sum(squares) / DIM + eps);
        for (u32 i = lane; i < DIM; i += 32) x[i] = x[i] * scale * norm[i];
        __syncwarp();
    }
    for (u32 i = lane; i < pairs; i += 32) {
        u32 first = adjacent ? 2 * i : i, second = adjacent ? 2 * i + 1 : i + pairs;
        float sine, cosine, a = x[first], b = x[second];
        sincosf(__fmul_rn((float)pos, inv_freq[i]), &sine, &cosine);
        x[first] = a * cosine - b * sine;
        x[second] = b * cosine + a * sine;
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(128)
attn_prepare(const float* q, const float* q_norm, float* q_out, const float* k, const float* v, const float* k_norm,
             const float* inv_freq, u32 pairs, u32 adjacent, const LaneStep* steps, u32 count, const u32* table, u32 max_pages,
             u32* keys, u32* values, u32 q_heads, u32 q_stride, u32 kv_heads, float eps) {
    launch_next();
    __shared__ float heads[4][DIM];
    float* x = heads[threadIdx.x / 32];
    u32 row = blockIdx.x, head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    wait();
    u32 of = lane_of(steps, count, row);
    if (of == count || head >= q_heads + 2 * kv_heads) return;
    LaneStep step = steps[of];
    u32 pos = step.pos + row - step.row0;
    if (head < q_heads) {
        const float* from = q + ((u64)row * q_heads + head) * q_stride;
        for (u32 i = lane; i < DIM; i += 32) x[i] = from[i];
        __syncwarp();
        norm_and_turn(x, q_norm, inv_freq, pairs, adjacent, pos, eps);
        float* to = q_out + ((u64)row * q_heads + head) * DIM;
        for (u32 i = lane; i < DIM; i += 32) to[i] = x[i];
        return;
    }
    head -= q_heads;
    bool key = head < kv_heads;
    head -= key ? 0 : kv_heads;
    const float* from = (key ? k : v) + ((u64)row * kv_heads + head) * DIM;
    for (u32 i = lane; i < DIM; i += 32) x[i] = from[i];
    __syncwarp();
    u32 page = table[(u64)step.slot * max_pages + pos / PAGE_TOKENS], slot = pos % PAGE_TOKENS;
    u64 block = ((u64)page * kv_heads + head) * PAGE_TOKENS * (DIM / 2);
    if (key) {
        norm_and_turn(x, k_norm, inv_freq, pairs, adjacent, pos, eps);
        for (u32 i = lane; i < DIM / 2; i += 32) keys[block + i * PAGE_TOKENS + slot] = pack_bf16(x[2 * i], x[2 * i + 1]);
    } else {
        for (u32 i = lane; i < DIM / 2; i += 32) values[block + slot * (DIM / 2) + i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
}
