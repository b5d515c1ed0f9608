// attn_prepare: per head norm and rotation of queries and keys; keys and values into their pages as bf16
// shapes   q (rows, q_heads, q_stride) f32; q_out (rows, q_heads, DIM) f32; k, v (rows, kv_heads, DIM) f32;
//          pages as `KvPool` in step.rs has them
// launch   grid (rows, (q_heads + 2 kv_heads) / 4), block 128: a warp owns a head of q, k or v
// traffic  every element once
// source   definition: mod.rs reference(); head.cuh. A lane adds its squares in order, then a tree over lanes

extern "C" __global__ void __launch_bounds__(128)
attn_prepare(const float* q, const float* q_norm, float* q_out, const float* k, const float* v, const float* k_norm,
             const float* inv_freq, const LaneStep* steps, u32 count, const u32* table, u32 max_pages, u32* keys, u32* values,
             u32 q_heads, u32 q_stride, u32 kv_heads, float eps) {
    __shared__ float2 turns[PAIRS + 1];
    launch_next();
    u32 row = blockIdx.x, head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    wait();
    u32 of = lane_of(steps, count, row);
    if (of == count) return;
    LaneStep step = steps[of];
    u32 pos = step.pos + row - step.row0;
    for (int i = threadIdx.x; i < PAIRS; i += 128) turns[i] = turn_of(inv_freq, pos, i);
    __syncthreads();
    if (head >= q_heads + 2 * kv_heads) return;
    Head x;
    if (head < q_heads) {
        x.load(q + ((u64)row * q_heads + head) * q_stride);
        x.norm(q_norm, eps);
        x.turn(turns);
        float* to = q_out + ((u64)row * q_heads + head) * DIM;
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++)
            if (lane + 32 * j < DIM) to[lane + 32 * j] = x.x[j];
        return;
    }
    head -= q_heads;
    bool key = head < kv_heads;
    head -= key ? 0 : kv_heads;
    u32 page = table[(u64)step.slot * max_pages + pos / PAGE_TOKENS], slot = pos % PAGE_TOKENS;
    u64 block = ((u64)page * kv_heads + head) * PAGE_TOKENS * (DIM / 2);
    x.load((key ? k : v) + ((u64)row * kv_heads + head) * DIM);
    if (key) {
        x.norm(k_norm, eps);
        x.turn(turns);
        x.store_key(keys + block, slot);
    } else {
        x.store_value(values + block, slot);
    }
}
