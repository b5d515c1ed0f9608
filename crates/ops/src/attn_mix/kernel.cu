// attn_mix: norm and rotation, attention and output gate of a few rows of each lane, after attention/split.cu and
// attn_prepare/head.cuh, whose parts these kernels are made of; so they have the bits of the ops one by one.
//
// `attend` is `split` whose blocks make the queries of an item themselves, and the keys and values of all new positions
// in its chunk; pages that hold such positions come into the ring after that, all others before wait(), as lane memory
// (kernel.rs). A row with one chunk goes through the gate at once; `finish` folds the others. While there are blocks
// enough, an item has just some of a lane's rows: items of the same chunk write the same keys and values.
//
// Defines of both, and: GATED; STRIDE, ACT_BF16: of the output. ROWS is the most rows of a lane.

#define SOME_PAIRS (PAIRS > 0 ? PAIRS : 1)

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

// Rows of one item, and whether scratch holds all items. Follows from the steps, for all blocks alike.
struct Sharing {
    u32 rows;
    bool split;

    __device__ __forceinline__ Sharing(const LaneStep* steps, u32 count, u32 capacity, u32 blocks) {
        u32 items = items_before(steps, count), parts = 8;
        split = items <= capacity;
        while (parts > 1 && items * parts > min(capacity, blocks)) parts /= 2;
        rows = (ROWS + parts - 1) / parts;
    }
    __device__ __forceinline__ u32 groups(const LaneStep& step) const {
        return (step.rows + rows - 1) / rows;
    }
};

// Walks a block's items in order, as `Items`.
struct Shares {
    const LaneStep* steps;
    u32 count, at, base, lane;
    Sharing sharing;

    __device__ __forceinline__ bool next(Item& item) {
        for (; lane < count; lane++) {
            LaneStep step = step_of(steps, lane);
            Span span = span_of(step);
            u32 chunks = sharing.split ? span.chunks : min(span.chunks, 1), groups = sharing.groups(step);
            u32 i = at - base, items = chunks * groups * KV_HEADS;
            if (i < items) {
                item.step = step;
                item.row = i % groups * sharing.rows;
                item.rows = min(step.rows - item.row, sharing.rows);
                i /= groups;
                item.kv_head = i % KV_HEADS;
                item.chunk = span.first + i / KV_HEADS;
                item.chunks = sharing.split ? 1 : span.chunks;
                u32 pos = step.pos + item.row;
                item.first_page = start_of(pos) / PAGE_TOKENS;
                item.last_page = (end_of(step, pos + item.rows - 1) - 1) / PAGE_TOKENS;
                at += gridDim.x;
                return true;
            }
            base += items;
        }
        return false;
    }
};

// Whether some row of the item sees a page with new positions in the item's chunks.
__device__ __forceinline__ bool sees_new(const Item& item) {
    u32 first = max(item.chunk * CHUNK_PAGES, item.first_page);
    u32 end = min((item.chunk + item.chunks) * CHUNK_PAGES, item.last_page + 1);
    return end > first && end > item.step.pos / PAGE_TOKENS;
}

// `produce`, but pages with new positions wait for `written`.
__device__ void fill(Shared& shared, Beside& beside, Shares items, const Inputs& in) {
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
                wanted >= first && wanted < end ? __ldcg(in.table + (u64)item.step.slot * in.max_pages + wanted) : 0;
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

// The keys and values of the new positions in the item's chunks. By all warps.
__device__ __forceinline__ void make_keys(const Beside& beside, const Item& item, const Inputs& in) {
    for (u32 i = threadIdx.x / 32; i < 2 * item.step.rows; i += WARPS) {
        u32 row = i / 2, pos = item.step.pos + row, chunk = pos / CHUNK;
        bool key = i % 2 == 0;
        if (chunk < item.chunk || chunk >= item.chunk + item.chunks) continue;
        Head x;
        x.load((key ? in.k : in.v) + ((u64)(item.step.row0 + row) * KV_HEADS + item.kv_head) * DIM);
        u64 block = in.table[(u64)item.step.slot * in.max_pages + pos / PAGE_TOKENS];
        block = (block * KV_HEADS + item.kv_head) * (PAGE_TOKENS * (DIM / 2));
        if (key) {
            x.norm(in.k_norm, in.eps);
            x.turn(beside.turns[row]);
            x.store_key(in.keys + block, pos % PAGE_TOKENS);
        } else {
            x.store_value(in.values + block, pos % PAGE_TOKENS);
        }
    }
}

// The item's query heads into shared memory; what is not there may stay anything. By all warps, AT_ONCE heads each.
#define AT_ONCE 3
__device__ __forceinline__ void make_queries(Shared& shared, const Beside& beside, const Item& item, const Inputs& in) {
    u32 lane = threadIdx.x % 32, heads = item.rows * GROUP;
    for (u32 first = threadIdx.x / 32; first < heads; first += AT_ONCE * WARPS) {
        Head x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            u32 m = min(first + n * WARPS, heads - 1), row = item.row + m / GROUP;
            u64 head = (u64)(item.step.row0 + row) * HEADS + item.kv_head * GROUP + m % GROUP;
            x[n].load(in.q + head * ((1 + GATED) * DIM));
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            u32 m = first + n * WARPS;
            if (m >= heads) continue;
            x[n].norm(in.q_norm, in.eps);
            x[n].turn(beside.turns[item.row + m / GROUP]);
#pragma unroll
            for (int j = 0; j < HEAD_OWN; j++) {
                u32 i = lane + 32 * j, w = x[n].word(j), word = i / 2;
                if (i % 2 == 0 && (DIM % 32 == 0 || i < DIM))
                    shared.queries[m][word / QUARTER_ROWS * QUERY_QUARTER + word % QUARTER_ROWS] = w;
            }
        }
    }
}

// The gates of two neighbours of a row of a head.
__device__ __forceinline__ float2 gates_of(const float* q, u64 row, u32 head, u32 column) {
    if (!GATED) return make_float2(0.0f, 0.0f);
    return *(const float2*)(q + ((row * HEADS + head) * 2 + 1) * DIM + column);
}
__device__ __forceinline__ void store_gated(char* out, u64 row, u32 head, u32 column, float2 x, float2 gates) {
    if (GATED) x.x /= 1.0f + expf(-gates.x), x.y /= 1.0f + expf(-gates.y);
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
    const Sharing sharing(steps, count, capacity, gridDim.x);
    const bool split = sharing.split;
    Shares items = {steps, count, blockIdx.x, 0, 0, sharing};
    if (threadIdx.x >= CONSUMERS) {
        fill(shared, beside, items, in);
        wait();
        return;
    }
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = 0;
    Item item;
    bool waited = false;
    u32 made = 0xffffffff; // the queries in shared memory: their first row and key/value head
    for (u32 index = blockIdx.x; items.next(item); index += gridDim.x) {
        u32 wanted = (item.step.row0 + item.row) * KV_HEADS + item.kv_head;
        bool turns = !waited || wanted / KV_HEADS != made / KV_HEADS;
        if (PAIRS > 0 && turns) {
            for (u32 i = threadIdx.x; i < item.step.rows * PAIRS; i += CONSUMERS)
                beside.turns[i / SOME_PAIRS][i % SOME_PAIRS] =
                    turn_of(inv_freq, item.step.pos + i / SOME_PAIRS, i % SOME_PAIRS);
        }
        if (!waited) wait();
        waited = true;
        if (turns) barrier(1, CONSUMERS);
        // Keys and values first: the producer waits for them.
        if (sees_new(item)) {
            make_keys(beside, item, in);
            asm volatile("fence.proxy.async;" ::: "memory");
            __syncwarp();
            if (threadIdx.x % 32 == 0) phase_arrive(shared_address(&beside.written));
        }
        if (wanted != made) {
            make_queries(shared, beside, item, in);
            barrier(1, CONSUMERS);
        }
        made = wanted;
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
                    u32 pos = item.step.pos + item.row + row;
                    if (row >= item.rows || (split && !sees_chunk(item.step, pos, item.chunk))) continue;
                    Softmax& of = total[tile][half];
                    float2 by = fold(of, state[tile][half]);
                    // Between chunks the sums wait in `mixed`.
                    bool whole = !split || one_chunk(item.step, pos);
                    u64 at_row = item.step.row0 + item.row + row;
                    u32 head = item.kv_head * GROUP + m % GROUP;
                    float* to = whole ? mixed + (at_row * HEADS + head) * DIM : sums_of(scratch, capacity, index) + m * DIM;
                    bool gate = whole && last;
                    float2 sums[2 * OWN_SPANS], gates[2 * OWN_SPANS];
#pragma unroll
                    for (int i = 0; i < 2 * OWN_SPANS; i++) {
                        u32 span = warp + WARPS * (i / 2), column = span * 16 + i % 2 * 8 + 2 * t;
                        sums[i] = gates[i] = make_float2(0.0f, 0.0f);
                        if (SPANS % WARPS != 0 && span >= SPANS) continue;
                        if (chunk > 0) sums[i] = *(const float2*)(to + column);
                        if (gate) gates[i] = gates_of(q, at_row, head, column);
                    }
#pragma unroll
                    for (int i = 0; i < 2 * OWN_SPANS; i++) {
                        u32 span = warp + WARPS * (i / 2), column = span * 16 + i % 2 * 8 + 2 * t;
                        if (SPANS % WARPS != 0 && span >= SPANS) continue;
                        const float(&x)[4] = part[tile][i / 2][i % 2];
                        float2 sum;
                        sum.x = __fmaf_rn(sums[i].x, by.x, x[2 * half] * by.y);
                        sum.y = __fmaf_rn(sums[i].y, by.x, x[2 * half + 1] * by.y);
                        if (!gate) *(float2*)(to + column) = sum;
                        else store_gated(out, at_row, head, column, make_float2(sum.x / of.sum, sum.y / of.sum), gates[i]);
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
    const float* q, const LaneStep* steps, const float* scratch, char* out, u32 count, u32 capacity, u32 blocks) {
    launch_next();
    u32 row = blockIdx.x, head = blockIdx.y, column = 4 * threadIdx.x, own = threadIdx.x % 32;
    u32 lane = lane_of(steps, count, row);
    const Sharing sharing(steps, count, capacity, blocks);
    LaneStep step = lane < count ? step_of(steps, lane) : LaneStep{};
    u32 before = 0; // items of other lanes
    for (u32 l = own; l < lane; l += 32) {
        LaneStep other = step_of(steps, l);
        before += span_of(other).chunks * sharing.groups(other) * KV_HEADS;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) before += __shfl_xor_sync(WARP_ALL, before, d);
    wait();
    u32 r = row - step.row0, pos = step.pos + r;
    if (lane == count || !sharing.split || one_chunk(step, pos)) return;
    Span span = span_of(step);
    u32 first = start_of(pos) / CHUNK, chunks = (end_of(step, pos) - 1) / CHUNK + 1 - first;
    u32 groups = sharing.groups(step), stride = KV_HEADS * groups;
    u32 item = before + ((first - span.first) * KV_HEADS + head / GROUP) * groups + r / sharing.rows;
    u32 m = r % sharing.rows * GROUP + head % GROUP;
    const float* sums = sums_of((float*)scratch, capacity, 0) + m * DIM + (column < DIM ? column : 0);
    float2 low = make_float2(0.0f, 0.0f), high = low;
    if (column < DIM) low = gates_of(q, row, head, column), high = gates_of(q, row, head, column + 2);
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
    store_gated(out, row, head, column, make_float2(sum.x / total.sum, sum.y / total.sum), low);
    store_gated(out, row, head, column + 2, make_float2(sum.z / total.sum, sum.w / total.sum), high);
}
