// A row is shared by a cluster of blocks. Every block finds the best k of its part, and the first
// block the best of those.
//
// All is done on pairs (logit, id) that order as one 64-bit number, larger logits and then lower ids
// first, so no two are equal and nothing depends on the order of work. The k-th largest of the
// threads' best pairs bounds the k-th largest of all from below, and few pairs exceed it.

#define THREADS 512
#define WARPS (THREADS / 32)
#define MAX_K 32
#define MAX_PARTS 16
// Threads that may exceed the bound.
#define FEW 64
#define LIST 2048

struct Shared {
    u64 list[LIST];
    u64 best[MAX_PARTS * MAX_K];
    u32 count;
};
__shared__ Shared sh;

__device__ __forceinline__ u64 pair(float z, u32 id) {
    z = z > NEG_INF ? z : NEG_INF;
    // Both zeros order alike.
    return (u64)ordered(__fadd_rn(z, 0.0f)) << 32 | ~id;
}

// A thread's share of its warp's range: 32 logits at a time, all in flight at once. The logit at
// place 4 i + c of a batch from `at` on has the id at + 128 i + c.
struct Batch {
    float z[32];
    __device__ __forceinline__ Batch(const float *row, u32 at, u32 end) {
        Quads<float, float4, 8> quads(row, at, end, NEG_INF);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float4 v = quads.v[i];
            z[4 * i] = v.x, z[4 * i + 1] = v.y, z[4 * i + 2] = v.z, z[4 * i + 3] = v.w;
        }
    }
};
#define BATCH (8 * 128)
__device__ __forceinline__ u32 id_at(u32 at, u32 place) {
    return at + place / 4 * 128 + place % 4;
}

// The places of a batch whose pairs reach a bound.
__device__ __forceinline__ u32 reaching(const Batch &batch, u32 at, u32 end, u64 bound) {
    u32 places = 0;
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 id = id_at(at, i);
        if (id < end && pair(batch.z[i], id) >= bound) places |= 1u << i;
    }
    return places;
}

// How many pairs of this thread's share reach a bound; puts them on the list, as far as it is long.
__device__ __noinline__ u32 gather(const float *row, u32 first, u32 end, u64 bound, bool keep) {
    u32 count = 0;
    for (u32 at = first; at < end; at += BATCH) {
        u32 places = reaching(Batch(row, at, end), at, end, bound);
        count += __popc(places);
        for (; keep && places != 0; places &= places - 1) {
            u32 id = id_at(at, __ffs(places) - 1);
            u32 slot = atomicAdd(&sh.count, 1);
            if (slot < LIST) sh.list[slot] = pair(row[id], id);
        }
    }
    return count;
}

__device__ __forceinline__ u32 block_sum(u32 x) {
    __shared__ u32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    x = __reduce_add_sync(WARP_ALL, x);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, x);
    __syncthreads();
    x = total;
    __syncthreads();
    return x;
}

// Entries of the list that are larger than this one.
__device__ __forceinline__ u32 larger(const u64 *list, u32 n, u64 entry) {
    u32 rank = 0;
#pragma unroll 8
    for (u32 i = 0; i < n; i++) rank += list[i] > entry;
    return rank;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k(const float *logits, u32 *ids, float *values, u32 stride, u32 valid, u32 k, u32 span) {
    launch_next();
    u32 part = blockIdx.x, parts = gridDim.x, row = blockIdx.y, tid = threadIdx.x;
    if (tid == 0) sh.count = 0;
    cluster_sync(parts);
    wait();
    const float *x = logits + (u64)row * stride;
    u32 first = (part * WARPS + tid / 32) * span, end = min(first + span, valid);
    first += tid % 32 * 4;

    float best = NEG_INF;
    u32 best_id = first;
    for (u32 at = first; at < end; at += BATCH) {
        Batch batch(x, at, end);
#pragma unroll
        for (u32 i = 0; i < 32; i++)
            if (batch.z[i] > best) best = batch.z[i], best_id = id_at(at, i);
    }
    u64 mine = first < end ? pair(best, best_id) : 0;

    // The largest number that k or more threads reach, or as soon as few do, a smaller one.
    u64 bound = 0;
    for (u64 bit = (u64)1 << 63; bit != 0; bit >>= 1) {
        u32 count = __syncthreads_count(mine >= (bound | bit));
        if (count >= k) bound |= bit;
        if (count >= k && count <= FEW) break;
    }
    // Where fewer than k threads have any, they all take part.
    bound = max(bound, (u64)1);
    if (mine >= bound) gather(x, first, end, bound, true);
    __syncthreads();
    u32 n = sh.count;
    if (n > LIST) {
        // One thread had many of the largest. Find the k-th itself.
        bound = 0;
        for (u64 bit = (u64)1 << 63; bit != 0; bit >>= 1) {
            u32 count = mine >= (bound | bit) ? gather(x, first, end, bound | bit, false) : 0;
            if (block_sum(count) >= k) bound |= bit;
        }
        if (tid == 0) sh.count = 0;
        __syncthreads();
        if (mine >= bound) gather(x, first, end, bound, true);
        __syncthreads();
        n = sh.count;
    }
    for (u32 i = tid; i < n; i += THREADS) {
        u64 entry = sh.list[i];
        u32 rank = larger(sh.list, n, entry);
        if (rank < k) peer_put(&sh.best[part * k + rank], 0, entry);
    }
    if (tid >= n && tid < k) peer_put(&sh.best[part * k + tid], 0, 0);
    cluster_sync(parts);
    if (part != 0 || tid >= parts * k) return;
    u64 entry = sh.best[tid];
    u32 rank = entry == 0 ? k : larger(sh.best, parts * k, entry);
    if (rank >= k) return;
    u32 id = ~(u32)entry;
    float z = x[id];
    ids[row * k + rank] = id;
    values[row * k + rank] = z > NEG_INF ? z : NEG_INF;
}
