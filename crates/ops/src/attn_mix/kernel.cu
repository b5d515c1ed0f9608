// attn_mix: norm and rotation, attention and output gate of a few rows of each lane, after attention/split.cu and
// attn_prepare/head.cuh, whose parts these kernels are made of; so they have the bits of the ops one by one.
//
// `attend` is `split` whose blocks make the queries of an item themselves, and the keys and values of all new positions
// in its chunk; pages that hold such positions come into the ring after that, all others before wait(), as lane memory
// (kernel.rs). `finish` folds and gates. While there are blocks enough, an item has just some of a lane's rows: items of
// the same chunk write the same keys and values.
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

// Whether some row of the item sees a page with new positions in the item's chunks.
__device__ __forceinline__ bool sees_new(const Item& item) {
    u32 first = max(item.chunk * item.pages, item.first_page);
    u32 end = min((item.chunk + item.chunks) * item.pages, item.last_page + 1);
    return end > first && end > item.step.pos / PAGE_TOKENS;
}

// The keys and values of the new positions in the item's chunks. By all warps.
__device__ __forceinline__ void make_keys(const Beside& beside, const Item& item, const Inputs& in) {
    for (u32 i = threadIdx.x / 32; i < 2 * item.step.rows; i += WARPS) {
        u32 row = i / 2, pos = item.step.pos + row, chunk = pos / (item.pages * PAGE_TOKENS);
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

// The item's query heads into shared memory; what is not there may stay anything. By all warps, some heads each.
#define HEADS_AT_ONCE 6
__device__ __forceinline__ void make_queries(Shared& shared, const Beside& beside, const Item& item, const Inputs& in) {
    u32 lane = threadIdx.x % 32, heads = item.rows * GROUP;
    for (u32 first = threadIdx.x / 32; first < heads; first += HEADS_AT_ONCE * WARPS) {
        Head x[HEADS_AT_ONCE];
#pragma unroll
        for (int n = 0; n < HEADS_AT_ONCE; n++) {
            u32 m = min(first + n * WARPS, heads - 1), row = item.row + m / GROUP;
            u64 head = (u64)(item.step.row0 + row) * HEADS + item.kv_head * GROUP + m % GROUP;
            x[n].load(in.q + head * ((1 + GATED) * DIM));
        }
        if (in.q_norm) {
            Head weight;
            weight.load(in.q_norm);
#pragma unroll
            for (int n = 0; n < HEADS_AT_ONCE; n++) x[n].norm(weight, in.eps);
        }
#pragma unroll
        for (int n = 0; n < HEADS_AT_ONCE; n++)
            x[n].turn(beside.turns[item.row + min(first + n * WARPS, heads - 1) / GROUP]);
#pragma unroll
        for (int n = 0; n < HEADS_AT_ONCE; n++) {
            u32 m = first + n * WARPS;
#pragma unroll
            for (int j = 0; j < HEAD_OWN; j++) {
                u32 i = lane + 32 * j, w = x[n].word(j), word = i / 2;
                if (m < heads && i % 2 == 0 && (DIM % 32 == 0 || i < DIM))
                    shared.queries[m][word / QUARTER_ROWS * QUERY_QUARTER + word % QUARTER_ROWS] = w;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(
    const float* q, const float* q_norm, const float* k, const float* v, const float* k_norm, const float* inv_freq,
    u32* keys, u32* values, const u32* table, const LaneStep* steps, float* mixed, float* partials, u32 count, u32 max_pages,
    u32 rows, u32 in_parts, float eps, float scale) {
    extern __shared__ __align__(128) u8 raw[];
    Beside& beside = *(Beside*)raw;
    Shared& shared = *(Shared*)(raw + BESIDE);
    static_assert(BESIDE + sizeof(Shared) <= SHARED, "more shared memory than was asked for");
    launch_next();
    if (threadIdx.x == 0) phase_init(shared_address(&beside.written), WARPS);
    begin(shared);
    __syncthreads();
    const Inputs in = {q, q_norm, k, v, k_norm, eps, keys, values, table, max_pages};
    Items items(steps, count, in_parts != 0);
    if (threadIdx.x >= CONSUMERS) {
        u32 made = 0;
        produce(shared, items, keys, values, table, max_pages, [&](const Item& item, u32 page, bool& ready) {
            if (ready || page < item.step.pos / PAGE_TOKENS) return;
            phase_wait(shared_address(&beside.written), made++ & 1);
            ready = true;
        });
        wait();
        return;
    }
    Work work = {(const u16*)keys, (const u16*)values, in_parts != 0, scale, Scratch(partials, rows), mixed, {0, 0}};
    Item item;
    bool waited = false;
    u32 made = 0xffffffff; // the queries in shared memory: their first row and key/value head
    while (items.next(item)) {
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
        work.take(shared, item, nullptr);
    }
    if (!waited) wait();
}

// Folds the chunks of one row and head, in ascending order, if `attend` did not, and gates. Four elements to a thread.
extern "C" __global__ void __launch_bounds__(64) finish(
    const float* q, const LaneStep* steps, const float* mixed, float* partials, char* out, u32 count, u32 rows,
    u32 in_parts) {
    launch_next();
    u32 row = blockIdx.x, head = blockIdx.y, column = 4 * threadIdx.x, lane = lane_of(steps, count, row);
    if (lane == count) return wait();
    LaneStep step = step_of(steps, lane);
    Span span = span_of(step, step.pos + row - step.row0);
    wait();
    u64 head_row = (u64)row * HEADS + head;
    u32 own = min(column, DIM - 4);
    float4 gates = make_float4(0.0f, 0.0f, 0.0f, 0.0f), x;
    if (GATED) gates = *(const float4*)(q + (head_row * 2 + 1) * DIM + own);
    if (in_parts) x = fold_all(Scratch(partials, rows), Scratch::place(row, head), span.chunks, own);
    else x = *(const float4*)(mixed + head_row * DIM + own);
    if (column >= DIM) return;
    if (GATED)
        x = make_float4(x.x / (1.0f + expf(-gates.x)), x.y / (1.0f + expf(-gates.y)), x.z / (1.0f + expf(-gates.z)),
                        x.w / (1.0f + expf(-gates.w)));
    act_store4<ACT_BF16>(out + (u64)row * STRIDE, head * DIM + column, x);
}
