// Attention of a round's rows, split along the keys into items of work (`items.cuh`): all query heads of a group times an
// item's rows are the columns of the matrix products, keys and then elements of the values their rows.
//
// In a pair of pages, each of 8 warps scores 16 keys for all columns; weights go through shared memory, and
// each warp then sums its elements of the values. A chunk's results go to scratch, and `combine` folds
// them in ascending order. If scratch is too small, a block folds all chunks of its rows itself, with the same operations.
//
// Defines of `items.cuh`, and: TILES of 8 columns; UNITS of the ring; SHARED: bytes.

#define GROUP (HEADS / KV_HEADS)
#define WARPS 8
#define PIPELINED (__CUDA_ARCH__ >= 900)
#define THREADS (32 * (WARPS + PIPELINED))
#define CONSUMERS (32 * WARPS)

// A page of keys lies in four quarters of the dimension, of values in eight octets of keys, each a contiguous
// copy, and skewed so that matrix fragments come without bank conflicts.
#define QUARTER_ROWS (DIM / 8)
#define QUARTER_BYTES (QUARTER_ROWS * PAGE_TOKENS * 4)
#define QUARTER_STRIDE (QUARTER_BYTES + 32)
#define OCTET_BYTES (8 * DIM * 2)
#define OCTET_STRIDE (OCTET_BYTES + 16)
#define UNIT_BYTES (4 * QUARTER_STRIDE)

// Queries in words of two elements: four quarters of the dimension, as for the keys.
#define QUERY_QUARTER (QUARTER_ROWS + (24 - QUARTER_ROWS % 16) % 16)
#define QUERY_ROW (4 * QUERY_QUARTER + 2)
// Weights, in bytes.
#define WEIGHT_ROW (2 * PAGE_TOKENS * 2 + 16)

#define SPANS (DIM / 16)
#define OWN_SPANS ((SPANS + WARPS - 1) / WARPS)

// A running softmax: greatest score, sum of weights.
struct Softmax {
    float max, sum;
};

// In place of a place in scratch: not seen by the column's row.
#define UNSEEN 0xffffffffu

// Column m is row m / GROUP of the item and head m % GROUP of the group.
struct Shared {
    u32 queries[8 * TILES][QUERY_ROW];
    __align__(16) u8 weights[8 * TILES][WEIGHT_ROW];
    __align__(16) float totals[8 * TILES][WARPS];
    __align__(16) int maxima[3][8 * TILES]; // `ordered`: of the keys up to this pair, the one before and the next
    Softmax whole[8 * TILES];               // of the chunks so far
    float2 factors[8 * TILES];              // of the sums so far and of the chunk's
    u32 places[8 * TILES];                  // of the chunk in scratch
    u64 full[UNITS], empty[UNITS];
    __align__(128) u8 units[UNITS][UNIT_BYTES];
};
static_assert(sizeof(Shared) <= SHARED, "more shared memory than was asked for");

#if PIPELINED
// Fills the ring, in the order in which the consumers empty it: for a pair of pages its keys, then its values. `before`
// is called for each page, with a flag that is false at each item's beginning.
template <class Before>
__device__ __forceinline__ void produce(
    Shared& shared, Items items, const void* keys, const void* values, const u32* table, u32 max_pages, Before before) {
    u32 lane = threadIdx.x % 32, n = 0;
    Item item;
    while (items.next(item)) {
        bool ready = false;
        const u32* pool_pages = table + (u64)item.step.slot * max_pages;
        for (u32 chunk = item.chunk; chunk < item.chunk + item.chunks; chunk++) {
            u32 first, end, known = 0;
            pages_of(item, chunk, first, end);
            for (u32 pair = first & ~1u; pair < end; pair += 2) {
                // The pool's pages of the next 32.
                u32 ahead = (pair - (first & ~1u)) % 32;
                if (ahead == 0) known = max(pair + lane, first) < end ? __ldcg(pool_pages + max(pair + lane, first)) : 0;
#pragma unroll 1
                for (u32 i = 0; i < 4; i++) {
                    u32 page = pair + i % 2;
                    u64 block = __shfl_sync(WARP_ALL, known, ahead + i % 2);
                    if (page < first || page >= end) continue;
                    block = (block * KV_HEADS + item.kv_head) * (PAGE_TOKENS * DIM * 2);
                    before(item, page, ready);
                    u32 unit = n % UNITS;
                    phase_wait(shared_address(&shared.empty[unit]), (n / UNITS & 1) ^ 1);
                    u32 bar = shared_address(&shared.full[unit]);
                    u32 to = shared_address(shared.units[unit]);
                    if (lane == 0) phase_arrive_expecting(bar, PAGE_TOKENS * DIM * 2);
                    __syncwarp();
                    if (i < 2 && lane < 4)
                        bulk_copy(to + lane * QUARTER_STRIDE, (const u8*)keys + block + lane * QUARTER_BYTES,
                                  QUARTER_BYTES, bar);
                    if (i >= 2 && lane < 8)
                        bulk_copy(to + lane * OCTET_STRIDE, (const u8*)values + block + lane * OCTET_BYTES, OCTET_BYTES,
                                  bar);
                    n++;
                }
            }
        }
    }
}
#else
// Copies a page into a unit; all threads of the block.
__device__ void copy_page(u8* unit, const u16* from, u32 piece, u32 stride) {
    for (u32 i = threadIdx.x * 16; i < PAGE_TOKENS * DIM * 2; i += CONSUMERS * 16)
        *(uint4*)(unit + i / piece * stride + i % piece) = *(const uint4*)((const u8*)from + i);
}
#endif

// Whether one of two brain floats is not.
__device__ __forceinline__ bool not_finite(u32 pair) {
    return (pair & 0x7f80) == 0x7f80 || (pair & 0x7f800000) == 0x7f800000;
}

// Least and greatest beginning and end of what an item's rows see.
struct Seen {
    u32 first_start, last_start, first_end, last_end;

    __device__ __forceinline__ Seen(const Item& item) {
        u32 pos = item.step.pos + item.row, last = pos + item.rows - 1;
        first_start = start_of(pos), last_start = start_of(last);
        first_end = end_of(item.step, pos), last_end = end_of(item.step, last);
    }
    // Whether some row does not see all of a page.
    __device__ __forceinline__ bool cut(u32 page) const {
        return page * PAGE_TOKENS < last_start || (page + 1) * PAGE_TOKENS > first_end;
    }
};

// Whether the row of column m sees this position.
__device__ __forceinline__ bool sees(const Item& item, u32 m, u32 pos) {
    u32 own = item.step.pos + item.row + m / GROUP;
    return m / GROUP < item.rows && pos >= start_of(own) && pos < end_of(item.step, own);
}

__device__ void load_queries(Shared& shared, const Item& item, const float* q) {
    for (u32 i = threadIdx.x; i < 8 * TILES * (DIM / 4); i += CONSUMERS) {
        u32 m = i / (DIM / 4), pair = i % (DIM / 4) * 2, row = m / GROUP;
        uint2 words = make_uint2(0, 0);
        if (row < item.rows) {
            u32 head = item.kv_head * GROUP + m % GROUP;
            u64 from = ((u64)(item.step.row0 + item.row + row) * HEADS + head) * DIM + 2 * pair;
            float4 x = *(const float4*)(q + from);
            words = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
        }
        u32 quarter = pair / QUARTER_ROWS, word = pair % QUARTER_ROWS;
        *(uint2*)&shared.queries[m][quarter * QUERY_QUARTER + word] = words;
    }
}

__device__ __forceinline__ u32 load_word(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}
__device__ __forceinline__ uint2 load_words(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
    return x;
}

// Scores of keys `key + g` (elements 0, 1) and `key + g + 8` of a page for columns 8n + 2t and 8n + 2t + 1.
template <int N>
__device__ __forceinline__ void score(float (&s)[N][4], const Shared& shared, const u8* unit, u32 key, float scale) {
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = 0.0f;
    u32 words = shared_address(unit) + t * QUARTER_STRIDE + (key + g) * 4;
    u32 queries = shared_address(&shared.queries[g][t * QUERY_QUARTER]);
    // A step's operands are on their way while the step before multiplies.
    u32 a[2][4];
    uint2 b[2][N];
    auto load = [&](int step) {
        u32 at = words + 2 * step * PAGE_TOKENS * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) a[step % 2][i] = load_word(at + i / 2 * PAGE_TOKENS * 4 + i % 2 * 32);
#pragma unroll
        for (int n = 0; n < N; n++) b[step % 2][n] = load_words(queries + 32 * n * QUERY_ROW + 8 * step);
    };
    load(0);
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        if (step + 1 < DIM / 16) load(step + 1);
#pragma unroll
        for (int n = 0; n < N; n++) mma_bf16(s[n], a[step % 2], b[step % 2][n].x, b[step % 2][n].y);
    }
#pragma unroll
    for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] *= scale;
}

// Values that no row sees become zeros: their weights are zero, but they may be NaN. Values that only some
// rows see and that are not finite are added here and become zeros as well. Just this warp's elements.
template <int N>
__device__ __forceinline__ void clean_values(
    u8* unit, u32 page, const Item& item, const Seen& seen, const Shared& shared, u32 page_in_pair,
    float (&sums)[OWN_SPANS][N][4]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first = page * PAGE_TOKENS;
#pragma unroll
    for (int own = 0; own < OWN_SPANS; own++) {
        u32 span = warp + WARPS * own;
        if (span >= SPANS) continue;
        bool bad = false;
#pragma unroll
        for (u32 i = lane; i < 2 * PAGE_TOKENS; i += 32) {
            u32 key = i / 2, pos = first + key;
            uint4* at = (uint4*)(unit + key / 8 * OCTET_STRIDE + key % 8 * DIM * 2 + span * 32) + i % 2;
            if (pos < seen.first_start || pos >= seen.last_end) *at = make_uint4(0, 0, 0, 0);
            else if (pos < seen.last_start || pos >= seen.first_end) {
                uint4 v = *at;
                bad |= not_finite(v.x) || not_finite(v.y) || not_finite(v.z) || not_finite(v.w);
            }
        }
        if (!__any_sync(WARP_ALL, bad)) continue;
        for (u32 key = 0; key < PAGE_TOKENS; key++) {
            u32 pos = first + key;
            if (pos < seen.first_start || pos >= seen.last_end) continue;
            if (pos >= seen.last_start && pos < seen.first_end) continue;
            u16* at = (u16*)(unit + key / 8 * OCTET_STRIDE + key % 8 * DIM * 2 + span * 32);
            u32 column = page_in_pair * 64 + key % 8 * 8 + key / 8;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float v = bf16_to_f32(at[8 * (i / 2) + g]);
                if ((__float_as_uint(v) & 0x7f800000) != 0x7f800000) continue;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    u32 m = 8 * n + 2 * t + i % 2;
                    float weight = bf16_to_f32(((const u16*)shared.weights[m])[column]);
                    if (sees(item, m, pos)) sums[own][n][i] += weight * v;
                }
            }
            __syncwarp();
            if (lane < 16 && not_finite(at[lane])) at[lane] = 0;
            __syncwarp();
        }
    }
    __syncwarp();
    fence_shared_async();
}

// sums += values · weights, for one page and this warp's elements. Step i takes keys 8k + 2i and 8k + 2i + 1. Elements
// 0, 1 of a tile: element g of the span, columns 8n + 2t and 8n + 2t + 1; 2, 3: element g + 8.
template <int N>
__device__ __forceinline__ void add_values(
    float (&sums)[OWN_SPANS][N][4], const Shared& shared, const u8* unit, u32 page_in_pair) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 values = shared_address(unit) + lane % 8 * OCTET_STRIDE + lane / 16 * DIM * 2 + lane / 8 % 2 * 16;
    u32 weights = shared_address(shared.weights[lane % 8]) + page_in_pair * 128 + lane / 8 * 16;
#pragma unroll
    for (int steps = 0; steps < 2; steps++) {
        u32 b[N][4];
#pragma unroll
        for (int n = 0; n < N; n++) load_matrices(b[n], weights + 8 * n * WEIGHT_ROW + 64 * steps);
#pragma unroll
        for (int step = 0; step < 2; step++) {
#pragma unroll
            for (int own = 0; own < OWN_SPANS; own++) {
                u32 span = warp + WARPS * own;
                if (SPANS % WARPS != 0 && span >= SPANS) continue;
                u32 a[4];
                load_matrices_transposed(a, values + (4 * steps + 2 * step) * DIM * 2 + span * 32);
#pragma unroll
                for (int n = 0; n < N; n++) mma_bf16(sums[own][n], a, b[n][2 * step], b[n][2 * step + 1]);
            }
        }
    }
}

// 2^(a - b), where -inf - -inf counts as -inf. What is below the least normal number is zero.
__device__ __forceinline__ float exp2_of_difference(float a, float b) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a - (b == NEG_INF ? 0.0f : b)));
    return y;
}

// A float's bits, so that integers have the order of the floats; and back. A NaN is above or below them all.
__device__ __forceinline__ int ordered(int bits) {
    return bits ^ (bits >> 31 & 0x7fffffff);
}
#define ORDERED_NEG_INF ((int)0x807fffff)

// The greatest of C numbers of each of the eight lanes with the same t; those of the numbers from `first` on, C of them or
// fewer, stay with this lane. Lanes exchange halves as long as there are halves.
template <int C, int D = 16>
struct Greatest {
    static __device__ __forceinline__ void post(float (&x)[C], int* maxima, u32 first) {
        constexpr int LEFT = C % 2 == 0 ? C / 2 : C;
        bool upper = (threadIdx.x & D) != 0;
        float left[LEFT];
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            float keep = LEFT < C && upper ? x[i + C - LEFT] : x[i], send = LEFT < C && upper ? x[i] : x[i + C - LEFT];
            left[i] = fmaxf(keep, __shfl_xor_sync(WARP_ALL, send, D));
        }
        Greatest<LEFT, D / 2>::post(left, maxima, LEFT < C && upper ? first + LEFT : first);
    }
};
template <int C>
struct Greatest<C, 2> {
    static __device__ __forceinline__ void post(float (&x)[C], int* maxima, u32 first) {
        u32 t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < C; i++)
            atomicMax(&maxima[(first + i) / 2 * 8 + 2 * t + (first + i) % 2], ordered(__float_as_int(x[i])));
    }
};

// Turns scores into weights relative to the columns' new maxima, leaves them in shared memory, adds them up in `totals`
// and scales the sums so far. `nth`: of the pair since the block began. For the next pair there are no sums so far if
// this is the `last` of a chunk.
template <int N>
__device__ __forceinline__ void weigh(
    float (&s)[N][4], Shared& shared, u32 nth, bool first, bool last, float (&totals)[N][2],
    float (&sums)[OWN_SPANS][N][4]) {
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int* maxima = shared.maxima[nth % 3];
    const int* before = shared.maxima[(nth + 2) % 3] + 2 * t;
    int* after = shared.maxima[(nth + 1) % 3];
    float greatest[2 * N];
#pragma unroll
    for (int i = 0; i < 2 * N; i++) greatest[i] = fmaxf(s[i / 2][i % 2], s[i / 2][i % 2 + 2]);
    Greatest<2 * N>::post(greatest, maxima, 0);
    barrier(1, CONSUMERS);
    u32* words = (u32*)shared.weights[2 * t] + warp / 4 * 32 + 4 * g + warp % 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
        int2 now = *(const int2*)(maxima + 8 * n + 2 * t), was = *(const int2*)(before + 8 * n);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float max = __int_as_float(ordered(i ? now.y : now.x)), old = __int_as_float(ordered(i ? was.y : was.x));
            float factor = first ? 0.0f : exp2_of_difference(old, max);
            u32 pair = pack_bf16(exp2_of_difference(s[n][i], max), exp2_of_difference(s[n][i + 2], max));
            // Key 16w + g of a page lies in column 8 (g % 8) + 2w, key 16w + g + 8 beside it.
            words[(8 * n + i) * (WEIGHT_ROW / 4)] = pair;
            totals[n][i] = __fmaf_rn(totals[n][i], factor, __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000));
#pragma unroll
            for (int own = 0; own < OWN_SPANS; own++) sums[own][n][i] *= factor, sums[own][n][i + 2] *= factor;
        }
    }
    // Of all columns: the next item may have more.
    if (threadIdx.x < 8 * TILES) after[threadIdx.x] = last ? ORDERED_NEG_INF : maxima[threadIdx.x];
    barrier(1, CONSUMERS);
}

// A unit of the ring. Without the copy engine, the block's threads fill it now.
__device__ __forceinline__ u8* open_unit(Shared& shared, u32 n) {
#if PIPELINED
    phase_wait(shared_address(&shared.full[n % UNITS]), n / UNITS & 1);
#endif
    return shared.units[n % UNITS];
}

__device__ __forceinline__ void close_unit(Shared& shared, u32 n) {
#if PIPELINED
    __syncwarp();
    if (threadIdx.x % 32 == 0) phase_arrive(shared_address(&shared.empty[n % UNITS]));
#endif
}

// How far a block has come: units of the ring, and pairs of pages.
struct Progress {
    u32 units, pairs;
};

// Before the first item, by all threads.
__device__ __forceinline__ void begin(Shared& shared) {
    for (u32 m = threadIdx.x; m < 8 * TILES; m += THREADS) shared.maxima[0][m] = ORDERED_NEG_INF;
#if PIPELINED
    if (threadIdx.x == 0) {
        for (int i = 0; i < UNITS; i++) {
            phase_init(shared_address(&shared.full[i]), 1);
            phase_init(shared_address(&shared.empty[i]), WARPS);
        }
        phase_init_fence();
    }
#endif
}

// One chunk: the weighted sum of values of each column, and in `shared.totals` each warp's sum of weights.
template <int N>
__device__ __forceinline__ void attend(
    Shared& shared, const Item& item, const Seen& seen, u32 chunk, Progress& at, float scale,
    float (&sums)[OWN_SPANS][N][4], const u16* keys, const u16* values, const u32* pool_pages) {
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u32 first, end;
    pages_of(item, chunk, first, end);
    float totals[N][2];
#pragma unroll
    for (int i = 0; i < 2 * N; i++) totals[i / 2][i % 2] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * N * OWN_SPANS; i++) sums[i / 4 / N][i / 4 % N][i % 4] = 0.0f;
    for (u32 pair = first & ~1u; pair < end; pair += 2) {
        u32 low = max(pair, first), high = min(pair + 2, end);
#if !PIPELINED
        __syncthreads();
        for (u32 page = low; page < high; page++)
            copy_page(shared.units[page - low], keys + ((u64)pool_pages[page] * KV_HEADS + item.kv_head) * PAGE_TOKENS * DIM,
                      QUARTER_BYTES, QUARTER_STRIDE);
        __syncthreads();
        at.units = 0;
#endif
        float s[N][4];
        u32 page = pair + warp / 4, key = warp % 4 * 16;
        if (page >= low && page < high) {
            score(s, shared, open_unit(shared, at.units + page - low), key, scale);
            if (seen.cut(page)) {
#pragma unroll
                for (int i = 0; i < 4 * N; i++) {
                    u32 pos = page * PAGE_TOKENS + key + g + i % 4 / 2 * 8;
                    if (!sees(item, i / 4 * 8 + 2 * t + i % 2, pos)) s[i / 4][i % 4] = NEG_INF;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = NEG_INF;
        }
        for (u32 i = low; i < high; i++) close_unit(shared, at.units++);
        weigh(s, shared, at.pairs++, pair <= first, pair + 2 >= end, totals, sums);
#if !PIPELINED
        for (u32 page = low; page < high; page++)
            copy_page(shared.units[page - low], values + ((u64)pool_pages[page] * KV_HEADS + item.kv_head) * PAGE_TOKENS * DIM,
                      OCTET_BYTES, OCTET_STRIDE);
        __syncthreads();
        at.units = 0;
#endif
#pragma unroll 1
        for (u32 page = low; page < high; page++) {
            u8* unit = open_unit(shared, at.units);
            if (seen.cut(page)) clean_values(unit, page, item, seen, shared, page - pair, sums);
            add_values(sums, shared, unit, page - pair);
            close_unit(shared, at.units++);
        }
    }
    // Sums of weights, over the keys' threads.
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = totals[n][i];
#pragma unroll
            for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(WARP_ALL, sum, d);
            if (g == n % 8) shared.totals[8 * n + 2 * t + i][warp] = sum;
        }
    }
    barrier(1, CONSUMERS);
}

// total = total ⊕ chunk; returns the factors of their sums of values.
__device__ __forceinline__ float2 fold(Softmax& total, Softmax chunk) {
    float max = fmaxf(total.max, chunk.max);
    float2 by = make_float2(exp2_of_difference(total.max, max), exp2_of_difference(chunk.max, max));
    total.sum = __fmaf_rn(total.sum, by.x, chunk.sum * by.y);
    total.max = max;
    return by;
}

// Results of chunks, for `rows` rows: (max, sum) of each row's heads' chunks, after them the sums of values.
struct Scratch {
    Softmax* softmax;
    float* sums;

    __device__ __forceinline__ Scratch(float* scratch, u32 rows)
        : softmax((Softmax*)scratch), sums(scratch + (u64)rows * (2 * HEADS * PLACES)) {}
    // The first place of a row of the pass and a head.
    static __device__ __forceinline__ u32 place(u32 row, u32 head) {
        return (row * HEADS + head) * PLACES;
    }
};

// Leaves a chunk's results in scratch; or, where a block sees all chunks, folds them into `whole`, and after the last divides.
template <int N>
__device__ __forceinline__ void hand_on(
    Shared& shared, const Item& item, u32 chunk, bool split, u32 pairs, float (&sums)[OWN_SPANS][N][4],
    const Scratch& scratch, float* whole) {
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    bool first = chunk == item.chunk, last = chunk + 1 == item.chunk + item.chunks;
    whole += ((u64)(item.step.row0 + item.row) * HEADS + item.kv_head * GROUP) * DIM;
    if (threadIdx.x < 8 * N) {
        u32 m = threadIdx.x, row = item.row + m / GROUP, head = item.kv_head * GROUP + m % GROUP;
        u32 place = UNSEEN;
        if (m < item.rows * GROUP) {
            Span span = span_of(item.step, item.step.pos + row);
            Softmax part = {NEG_INF, 0.0f};
            if (chunk - span.first < span.chunks) {
                const float4* totals = (const float4*)shared.totals[m];
                float4 a = totals[0], b = totals[1];
                part.sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
                part.max = __int_as_float(ordered(shared.maxima[(pairs + 2) % 3][m]));
                place = Scratch::place(item.step.row0 + row, head) + chunk - span.first;
                if (split) scratch.softmax[place] = part;
            }
            if (!split) {
                Softmax all = {NEG_INF, 0.0f};
                if (!first) all = shared.whole[m];
                shared.factors[m] = fold(all, part);
                shared.whole[m] = all;
            }
        }
        shared.places[m] = place;
    }
    barrier(1, CONSUMERS);
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        u32 m = i / 2 * 8 + 2 * t + i % 2, place = shared.places[m];
        if (split ? place == UNSEEN : m >= item.rows * GROUP) continue;
        float2 by = shared.factors[m];
        float* to = split ? scratch.sums + (u64)place * DIM : whole + (m / GROUP * HEADS + m % GROUP) * DIM;
        to += warp * 16 + g;
#pragma unroll
        for (int j = 0; j < 2 * OWN_SPANS; j++) {
            if (SPANS % WARPS != 0 && warp + WARPS * (j / 2) >= SPANS) continue;
            float* at = to + 16 * WARPS * (j / 2) + 8 * (j % 2);
            float x = sums[j / 2][i / 2][i % 2 + 2 * (j % 2)];
            if (!split) x = __fmaf_rn(first ? 0.0f : *at, by.x, x * by.y);
            *at = x;
        }
    }
    if (split || !last) return;
    barrier(1, CONSUMERS);
    for (u32 i = threadIdx.x; i < item.rows * GROUP * DIM; i += CONSUMERS) {
        u32 m = i / DIM;
        whole[(m / GROUP * HEADS + m % GROUP) * DIM + i % DIM] /= shared.whole[m].sum;
    }
}

// What a block needs for all its items.
struct Work {
    const u16 *keys, *values;
    bool split;
    float scale;
    Scratch scratch;
    float* whole; // the results of rows whose chunks one block sees
    Progress at;

    // An item in columns of N tiles, queries made.
    template <int N>
    __device__ __forceinline__ void take_as(Shared& shared, const Item& item, const u32* pool_pages) {
        const Seen seen(item);
        for (u32 chunk = item.chunk; chunk < item.chunk + item.chunks; chunk++) {
            float sums[OWN_SPANS][N][4];
            attend(shared, item, seen, chunk, at, scale, sums, keys, values, pool_pages);
            hand_on(shared, item, chunk, split, at.pairs, sums, scratch, whole);
        }
    }
    __device__ __forceinline__ void take(Shared& shared, const Item& item, const u32* pool_pages) {
        constexpr int HALF = (TILES + 1) / 2, QUARTER = (TILES + 3) / 4;
        u32 tiles = (item.rows * GROUP + 7) / 8;
        if (QUARTER < HALF && tiles <= QUARTER) take_as<QUARTER>(shared, item, pool_pages);
        else if (HALF < TILES && tiles <= HALF) take_as<HALF>(shared, item, pool_pages);
        else take_as<TILES>(shared, item, pool_pages);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) split(
    const float* q, const u16* keys, const u16* values, const u32* table, const LaneStep* steps, float* out,
    float* partials, u32 count, u32 max_pages, u32 rows, u32 in_parts, float scale) {
    extern __shared__ __align__(128) u8 raw[];
    Shared& shared = *(Shared*)raw;
    launch_next();
    begin(shared);
    __syncthreads();
    wait();
    Items items(steps, count, in_parts != 0);
#if PIPELINED
    if (threadIdx.x >= CONSUMERS)
        return produce(shared, items, keys, values, table, max_pages, [](const Item&, u32, bool&) {});
#endif
    Work work = {keys, values, in_parts != 0, scale, Scratch(partials, rows), out, {0, 0}};
    Item item;
    while (items.next(item)) {
        load_queries(shared, item, q);
        barrier(1, CONSUMERS);
        work.take(shared, item, table + (u64)item.step.slot * max_pages);
    }
}

// Folds a row's and head's chunks in ascending order, for four elements from `column` on. By all threads of a warp: the
// factors of 32 chunks come from a scan over its lanes, since the greatest scores so far are exact in any order.
__device__ __forceinline__ float4 fold_all(const Scratch& scratch, u32 place, u32 chunks, u32 column) {
    constexpr u32 AT_ONCE = PLACES < 36 ? PLACES : 36;
    u32 own = threadIdx.x % 32;
    Softmax total = {NEG_INF, 0.0f};
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float* sums = scratch.sums + (u64)place * DIM + min(column, DIM - 4);
    for (u32 begun = 0; begun < chunks; begun += AT_ONCE) {
        float4 x[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (begun + i < chunks) x[i] = *(const float4*)(sums + (begun + i) * DIM);
#pragma unroll
        for (u32 part = 0; part < AT_ONCE; part += 32) {
            u32 done = begun + part, here = min(chunks, begun + AT_ONCE);
            if (done >= here) break;
            Softmax chunk = {NEG_INF, 0.0f};
            if (own < min(here - done, 32)) chunk = scratch.softmax[place + done + own];
            float so_far = chunk.max;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                float other = __shfl_up_sync(WARP_ALL, so_far, d);
                if (own >= d) so_far = fmaxf(so_far, other);
            }
            so_far = fmaxf(so_far, total.max);
            float previous = __shfl_up_sync(WARP_ALL, so_far, 1);
            if (own == 0) previous = total.max;
            float2 by = make_float2(exp2_of_difference(previous, so_far), exp2_of_difference(chunk.max, so_far));
            float weight = chunk.sum * by.y;
            total.max = __shfl_sync(WARP_ALL, so_far, 31);
#pragma unroll
            for (u32 i = part; i < part + 32 && i < AT_ONCE; i++) {
                if (begun + i >= here) break;
                float a = __shfl_sync(WARP_ALL, by.x, i - part), b = __shfl_sync(WARP_ALL, by.y, i - part);
                total.sum = __fmaf_rn(total.sum, a, __shfl_sync(WARP_ALL, weight, i - part));
                sum.x = __fmaf_rn(sum.x, a, x[i].x * b), sum.y = __fmaf_rn(sum.y, a, x[i].y * b);
                sum.z = __fmaf_rn(sum.z, a, x[i].z * b), sum.w = __fmaf_rn(sum.w, a, x[i].w * b);
            }
        }
    }
    return make_float4(sum.x / total.sum, sum.y / total.sum, sum.z / total.sum, sum.w / total.sum);
}

// A row and head, if blocks took its chunks one by one. Four elements to a thread.
extern "C" __global__ void __launch_bounds__(64) combine(
    const LaneStep* steps, float* out, float* partials, u32 count, u32 rows, u32 in_parts) {
    launch_next();
    wait();
    if (!in_parts) return;
    u32 row = blockIdx.x, head = blockIdx.y, column = 4 * threadIdx.x, lane = lane_of(steps, count, row);
    if (lane == count) return;
    LaneStep step = steps[lane];
    Span span = span_of(step, step.pos + row - step.row0);
    float4 x = fold_all(Scratch(partials, rows), Scratch::place(row, head), span.chunks, column);
    if (column < DIM) *(float4*)(out + ((u64)row * HEADS + head) * DIM + column) = x;
}
