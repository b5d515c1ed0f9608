// attn_mix: norm and rotation, attention and output gate of a few rows of each lane, after attention/split.cu and
// attn_prepare/head.cuh, whose parts these kernels are made of; so they have the bits of the ops one by one.
//
// `attend` is `split` whose blocks make the queries of an item themselves. The block whose chunk a new position lies
// in also makes its key and value; pages that hold such positions come into the ring after that, all others before
// wait(), as lane memory (kernel.rs). A row with one chunk goes through the gate at once; `finish` folds the others.
//
// Defines of both, and: GATED; STRIDE, ACT_BF16: of the output. ROWS is the most rows of a lane.

struct Inputs {
    const float *q, *q_norm, *k, *v, *k_norm;
    float eps;
    u32 *keys, *values;
    const u32* table;
    u32 max_pages;
};

// What is not in `Shared`, before it.
struct Beside {
    u64 written; // the new keys and values of the item are in their pages
    float2 turns[ROWS][PAIRS + 1];
};
#define BESIDE ((sizeof(Beside) + 127) / 128 * 128)

// `produce`, but pages with new positions wait for `written`.
__device__ void fill(Shared& shared, Beside& beside, Items items, const Inputs& in) {
    u32 lane = threadIdx.x % 32, n = 0, made = 0;
    Item item;
    while (items.next(item)) {
        u32 fresh = item.step.pos / PAGE_TOKENS;
        bool waited = false;
        for (u32 chunk = item.chunk; chunk < item.chunk + item.chunks; chunk++) {
            u32 first, end;
            pages_of(item, chunk, first, end);
            u32 wanted = chunk * CHUNK_PAGES + lane % CHUNK_PAGES;
            u32 pool_pages =
                wanted >= first && wanted < end ? in.table[(u64)item.step.slot * in.max_pages + wanted] : 0;
            for (u32 i = 0; i < 2 * CHUNK_PAGES; i++) {
                u32 kind = i % 4 / 2, at = i / 4 * 2 + i % 2, page = chunk * CHUNK_PAGES + at;
                if (page < first || page >= end) continue;
                u64 block = __shfl_sync(WARP_ALL, pool_pages, at);
                block = (block * KV_HEADS + item.kv_head) * (PAGE_TOKENS * DIM);
                if (page >= fresh && !waited) {
                    phase_wait(shared_address(&beside.written), made++ & 1);
                    waited = true;
                }
                u32 unit = n % UNITS;
                phase_wait(shared_address(&shared.empty[unit]), (n / UNITS & 1) ^ 1);
                u32 bar = shared_address(&shared.full[unit]);
                u32 to = shared_address(shared.units[unit]);
                if (lane == 0) phase_arrive_expecting(bar, PAGE_TOKENS * DIM * 2);
                __syncwarp();
                if (kind == 0 && lane < 4) {
                    const u8* from = (const u8*)((const u16*)in.keys + block) + lane * QUARTER_BYTES;
                    bulk_copy(to + lane * QUARTER_STRIDE, from, QUARTER_BYTES, bar);
                } else if (kind == 1 && lane < 8) {
                    const u8* from = (const u8*)((const u16*)in.values + block) + lane * OCTET_BYTES;
                    bulk_copy(to + lane * OCTET_STRIDE, from, OCTET_BYTES, bar);
                }
                n++;
            }
        }
    }
}

// The new key and value of an item's row, if they lie in its chunks. By one warp.
__device__ __forceinline__ void make_key(const Beside& beside, const Item& item, const Inputs& in, u32 row, bool key) {
    u32 pos = item.step.pos + row, page = pos / PAGE_TOKENS, chunk = pos / CHUNK;
    if (chunk < item.chunk || chunk >= item.chunk + item.chunks) return;
    u64 block = in.table[(u64)item.step.slot * in.max_pages + page];
    block = (block * KV_HEADS + item.kv_head) * (PAGE_TOKENS * (DIM / 2));
    Head x;
    x.load((key ? in.k : in.v) + ((u64)(item.step.row0 + row) * KV_HEADS + item.kv_head) * DIM);
    if (key) {
        x.norm(in.k_norm, in.eps);
        x.turn(beside.turns[row]);
        x.store_key(in.keys + block, pos % PAGE_TOKENS);
    } else {
        x.store_value(in.values + block, pos % PAGE_TOKENS);
    }
}

// Query head m of the item into shared memory; zeros for what is not there. By one warp.
__device__ __forceinline__ void make_query(Shared& shared, const Beside& beside, const Item& item, const Inputs& in, u32 m) {
    u32 row = m / GROUP, lane = threadIdx.x % 32;
    Head x;
    if (row < item.rows) {
        u32 head = item.kv_head * GROUP + m % GROUP;
        x.load(in.q + ((u64)(item.step.row0 + row) * HEADS + head) * ((1 + GATED) * DIM));
        x.norm(in.q_norm, in.eps);
        x.turn(beside.turns[row]);
    } else {
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) x.x[j] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < HEAD_OWN; j++) {
        u32 i = lane + 32 * j, w = x.word(j), word = i / 2;
        if (i % 2 == 0 && (DIM % 32 == 0 || i < DIM))
            shared.queries[m][word / QUARTER_ROWS * QUERY_QUARTER + word % QUARTER_ROWS] = w;
    }
}

// Two neighbours of a row of a head through the gate.
__device__ __forceinline__ void store_gated(char* out, const float* q, u64 row, u32 head, u32 column, float2 x) {
    if (GATED) {
        float2 g = *(const float2*)(q + ((row * HEADS + head) * 2 + 1) * DIM + column);
        x.x /= 1.0f + expf(-g.x), x.y /= 1.0f + expf(-g.y);
    }
    char* to = out + row * STRIDE;
    if (ACT_BF16) *(u32*)((u16*)to + head * DIM + column) = pack_bf16(x.x, x.y);
    else *(float2*)((float*)to + head * DIM + column) = x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(
    const float* q, const float* q_norm, const float* k, const float* v, const float* k_norm, const float* inv_freq,
    u32* keys, u32* values, const u32* table, const LaneStep* steps, float* mixed, float* scratch, char* out, u32 count,
    u32 max_pages, u32 capacity, float eps, float scale) {
    extern __shared__ __align__(128) u8 raw[];
    Beside& beside = *(Beside*)raw;
    Shared& shared = *(Shared*)(raw + BESIDE);
    static_assert(BESIDE + sizeof(Shared) <= SHARED, "more shared memory than was asked for");
    launch_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < UNITS; i++) {
            phase_init(shared_address(&shared.full[i]), 1);
            phase_init(shared_address(&shared.empty[i]), WARPS);
        }
        phase_init(shared_address(&beside.written), WARPS);
        phase_init_fence();
    }
    __syncthreads();
    const Inputs in = {q, q_norm, k, v, k_norm, eps, keys, values, table, max_pages};
    bool split = items_before(steps, count) <= capacity;
    Items items = {steps, count, blockIdx.x, 0, 0, split};
    if (threadIdx.x >= CONSUMERS) {
        fill(shared, beside, items, in);
        wait();
        return;
    }
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = 0;
    Item item;
    bool waited = false;
    for (u32 index = blockIdx.x; items.next(item); index += gridDim.x) {
        for (u32 i = threadIdx.x; i < item.rows * PAIRS; i += CONSUMERS)
            beside.turns[i / (PAIRS + (PAIRS == 0))][i % (PAIRS + (PAIRS == 0))] =
                turn_of(inv_freq, item.step.pos + i / (PAIRS + (PAIRS == 0)), i % (PAIRS + (PAIRS == 0)));
        if (!waited) wait();
        waited = true;
        barrier(1, CONSUMERS);
        // Keys and values first: the producer waits for them.
        u32 last_chunk = (item.step.pos + item.step.rows - 1) / CHUNK;
        bool fresh = item.step.pos / CHUNK < item.chunk + item.chunks && last_chunk >= item.chunk;
        if (fresh) {
            for (u32 i = warp; i < 2 * item.rows; i += WARPS) make_key(beside, item, in, i / 2, i % 2 == 0);
            asm volatile("fence.proxy.async;" ::: "memory");
            __syncwarp();
            if (threadIdx.x % 32 == 0) phase_arrive(shared_address(&beside.written));
        }
        for (u32 m = WARPS - 1 - warp; m < 16 * TILES; m += WARPS) make_query(shared, beside, item, in, m);
        barrier(1, CONSUMERS);
        Rows rows = rows_of(item);
        const u32* pool_pages = table + (u64)item.step.slot * max_pages;
        Softmax total[TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) total[i / 2][i % 2].max = NEG_INF, total[i / 2][i % 2].sum = 0.0f;
        for (u32 chunk = 0; chunk < item.chunks; chunk++) {
            Softmax state[TILES][2];
            float part[TILES][OWN_SPANS][2][4];
            attend(shared, item, rows, item.chunk + chunk, n, scale, state, part, (const u16*)keys, (const u16*)values,
                   pool_pages);
            bool last = chunk + 1 == item.chunks;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 m = 16 * tile + 8 * half + g, row = m / GROUP;
                    u32 pos = item.step.pos + row;
                    if (row >= item.rows || (split && !sees_chunk(item.step, pos, item.chunk))) continue;
                    Softmax& of = total[tile][half];
                    float2 by = fold(of, state[tile][half]);
                    // Between chunks the sums wait in `mixed`.
                    bool whole = !split || one_chunk(item.step, pos);
                    u64 at_row = item.step.row0 + row;
                    u32 head = item.kv_head * GROUP + m % GROUP;
                    float* to = whole ? mixed + (at_row * HEADS + head) * DIM : sums_of(scratch, capacity, index) + m * DIM;
#pragma unroll
                    for (int i = 0; i < 2 * OWN_SPANS; i++) {
                        u32 span = warp + WARPS * (i / 2), column = span * 16 + i % 2 * 8 + 2 * t;
                        if (SPANS % WARPS != 0 && span >= SPANS) continue;
                        const float(&x)[4] = part[tile][i / 2][i % 2];
                        float2 sum = chunk == 0 ? make_float2(0.0f, 0.0f) : *(const float2*)(to + column);
                        sum.x = __fmaf_rn(sum.x, by.x, x[2 * half] * by.y);
                        sum.y = __fmaf_rn(sum.y, by.x, x[2 * half + 1] * by.y);
                        if (!(whole && last)) *(float2*)(to + column) = sum;
                        else store_gated(out, q, at_row, head, column, make_float2(sum.x / of.sum, sum.y / of.sum));
                    }
                    if (!whole && warp == 0 && t == 0) softmax_of(scratch, index)[m] = of;
                }
            }
        }
    }
    if (!waited) wait();
}

// Folds the chunks of one row and head, in ascending order, and gates. Four columns to a thread. The factors of 32
// chunks come from a scan over a warp's lanes: the greatest scores so far are exact in any order.
#define BATCH 16
extern "C" __global__ void __launch_bounds__(64) finish(
    const float* q, const LaneStep* steps, const float* scratch, char* out, u32 count, u32 capacity) {
    launch_next();
    u32 row = blockIdx.x, head = blockIdx.y, column = 4 * threadIdx.x, own = threadIdx.x % 32;
    u32 lane = lane_of(steps, count, row);
    bool split = items_before(steps, count) <= capacity;
    LaneStep step = lane < count ? steps[lane] : LaneStep{};
    u32 before = items_before(steps, lane);
    wait();
    u32 r = row - step.row0, pos = step.pos + r;
    if (lane == count || !split || one_chunk(step, pos)) return;
    Span span = span_of(step);
    u32 first = start_of(pos) / CHUNK, chunks = (end_of(step, pos) - 1) / CHUNK + 1 - first;
    u32 item = before + ((first - span.first) * KV_HEADS + head / GROUP) * span.groups + r / ROWS;
    u32 m = r % ROWS * GROUP + head % GROUP, stride = KV_HEADS * span.groups;
    const float* sums = sums_of((float*)scratch, capacity, 0) + m * DIM + (column < DIM ? column : 0);
    Softmax total = {NEG_INF, 0.0f};
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (u32 done = 0; done < chunks; done += 32) {
        Softmax part = {NEG_INF, 0.0f};
        if (done + own < chunks) part = softmax_of((float*)scratch, item + (done + own) * stride)[m];
        float so_far = part.max;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            float other = __shfl_up_sync(WARP_ALL, so_far, d);
            if (own >= d) so_far = fmaxf(so_far, other);
        }
        so_far = fmaxf(so_far, total.max);
        float previous = __shfl_up_sync(WARP_ALL, so_far, 1);
        if (own == 0) previous = total.max;
        float2 by = make_float2(exp2_of_difference(previous, so_far), exp2_of_difference(part.max, so_far));
        float weight = part.sum * by.y;
        total.max = __shfl_sync(WARP_ALL, so_far, 31);
        u32 here = min(chunks - done, 32);
        for (u32 from = 0; from < here; from += BATCH) {
            float4 x[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                u64 at = item + (u64)(done + min(from + i, here - 1)) * stride;
                x[i] = *(const float4*)(sums + at * DIM * M);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                float a = __shfl_sync(WARP_ALL, by.x, from + i), b = __shfl_sync(WARP_ALL, by.y, from + i);
                float w = __shfl_sync(WARP_ALL, weight, from + i);
                if (from + i >= here) continue;
                total.sum = __fmaf_rn(total.sum, a, w);
                sum.x = __fmaf_rn(sum.x, a, x[i].x * b), sum.y = __fmaf_rn(sum.y, a, x[i].y * b);
                sum.z = __fmaf_rn(sum.z, a, x[i].z * b), sum.w = __fmaf_rn(sum.w, a, x[i].w * b);
            }
        }
    }
    if (column >= DIM) return;
    store_gated(out, q, row, head, column, make_float2(sum.x / total.sum, sum.y / total.sum));
    store_gated(out, q, row, head, column + 2, make_float2(sum.z / total.sum, sum.w / total.sum));
}
