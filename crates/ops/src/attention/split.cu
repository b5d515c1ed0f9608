// Attention of a round's rows, split along the keys. One item of work is a chunk of CHUNK_PAGES pages (on the
// absolute grid) for one lane, one key/value head and ROWS rows: all query heads of the group times the rows
// are the M rows of the matrix products. Blocks take items in turn; the items follow from LaneStep.
//
// In a pair of pages, each of 8 warps scores 16 keys for all M rows; weights go through shared memory, and
// each warp then sums its columns of the values. A chunk's results go to scratch, and `combine` folds
// them in ascending order; a row with one chunk is finished at once. If scratch holds fewer items than there
// are, a block folds all chunks of its rows itself, with the same operations.
//
// HEADS, KV_HEADS, DIM, CAUSAL, WINDOW (0: none); ROWS of a group; TILES of 16 M rows; UNITS of the ring;
// SHARED: bytes.

#define GROUP (HEADS / KV_HEADS)
#define M (ROWS * GROUP)
#define CHUNK_PAGES 4
#define CHUNK (CHUNK_PAGES * PAGE_TOKENS)
#define WARPS 8
#define PIPELINED (__CUDA_ARCH__ >= 900)
#define THREADS (32 * (WARPS + 1))
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

struct Shared {
    u32 queries[16 * TILES][QUERY_ROW];
    __align__(16) u8 weights[16 * TILES][WEIGHT_ROW];
    __align__(16) float maxima[16 * TILES][WARPS];
    __align__(16) float totals[16 * TILES][WARPS];
    u64 full[UNITS], empty[UNITS];
    __align__(128) u8 units[UNITS][UNIT_BYTES];
};
static_assert(sizeof(Shared) <= SHARED, "more shared memory than was asked for");

// The chunks that a lane's pass sees, and its groups of rows.
struct Span {
    u32 first, chunks, groups;
};

__device__ __forceinline__ u32 start_of(u32 pos) {
    return WINDOW > 0 && pos + 1 > WINDOW ? pos + 1 - WINDOW : 0;
}

__device__ __forceinline__ Span span_of(const LaneStep& step) {
    Span span;
    span.first = start_of(step.pos) / CHUNK;
    span.groups = (step.rows + ROWS - 1) / ROWS;
    span.chunks = step.rows > 0 ? (step.pos + step.rows - 1) / CHUNK + 1 - span.first : 0;
    return span;
}

// Items of all lanes before `lane`; of all for `lane` = count. All threads of a warp together.
__device__ __forceinline__ u32 items_before(const LaneStep* steps, u32 lane) {
    u32 sum = 0;
    for (u32 l = threadIdx.x % 32; l < lane; l += 32) {
        Span span = span_of(step_of(steps, l));
        sum += span.chunks * span.groups * KV_HEADS;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(WARP_ALL, sum, d);
    return sum;
}

// Visible keys of the row at this position.
__device__ __forceinline__ u32 end_of(const LaneStep& step, u32 pos) {
    return CAUSAL ? pos + 1 : step.pos + step.rows;
}

struct Item {
    LaneStep step;
    u32 row, rows;              // of the lane
    u32 kv_head, chunk, chunks; // absolute
    u32 first_page, last_page;  // that some row sees
};

// Walks a block's items in order.
struct Items {
    const LaneStep* steps;
    u32 count, at, base, lane;
    bool split;

    __device__ __forceinline__ bool next(Item& item) {
        for (; lane < count; lane++) {
            Span span = span_of(steps[lane]);
            u32 chunks = split ? span.chunks : min(span.chunks, 1);
            u32 items = chunks * span.groups * KV_HEADS;
            u32 i = at - base;
            if (i < items) {
                item.step = steps[lane];
                item.row = i % span.groups * ROWS;
                item.rows = min(item.step.rows - item.row, ROWS);
                i /= span.groups;
                item.kv_head = i % KV_HEADS;
                item.chunk = span.first + i / KV_HEADS;
                item.chunks = split ? 1 : span.chunks;
                u32 pos = item.step.pos + item.row;
                item.first_page = start_of(pos) / PAGE_TOKENS;
                item.last_page = (end_of(item.step, pos + item.rows - 1) - 1) / PAGE_TOKENS;
                at += gridDim.x;
                return true;
            }
            base += items;
        }
        return false;
    }
};

// The pages of a chunk that some row of the item sees: `first .. end`.
__device__ __forceinline__ void pages_of(const Item& item, u32 chunk, u32& first, u32& end) {
    first = max(chunk * CHUNK_PAGES, item.first_page);
    end = min((chunk + 1) * CHUNK_PAGES, item.last_page + 1);
}

#if PIPELINED
// Fills the ring, in the order in which the consumers empty it: for a pair of pages its keys, then its values.
__device__ void produce(
    Shared& shared, Items items, const u16* keys, const u16* values, const u32* table, u32 max_pages) {
    u32 lane = threadIdx.x % 32, n = 0;
    Item item;
    while (items.next(item)) {
        for (u32 chunk = item.chunk; chunk < item.chunk + item.chunks; chunk++) {
            u32 first, end;
            pages_of(item, chunk, first, end);
            u32 wanted = chunk * CHUNK_PAGES + lane % CHUNK_PAGES;
            u32 pool_pages =
                wanted >= first && wanted < end ? table[(u64)item.step.slot * max_pages + wanted] : 0;
            for (u32 pair = 0; pair < CHUNK_PAGES; pair += 2) {
                for (u32 kind = 0; kind < 2; kind++) {
                    for (u32 i = pair; i < pair + 2; i++) {
                        u32 page = chunk * CHUNK_PAGES + i;
                        if (page < first || page >= end) continue;
                        u64 block = __shfl_sync(WARP_ALL, pool_pages, i);
                        block = (block * KV_HEADS + item.kv_head) * (PAGE_TOKENS * DIM);
                        u32 unit = n % UNITS;
                        phase_wait(shared_address(&shared.empty[unit]), (n / UNITS & 1) ^ 1);
                        u32 bar = shared_address(&shared.full[unit]);
                        u32 to = shared_address(shared.units[unit]);
                        if (lane == 0) phase_arrive_expecting(bar, PAGE_TOKENS * DIM * 2);
                        __syncwarp();
                        if (kind == 0 && lane < 4) {
                            const u8* from = (const u8*)(keys + block) + lane * QUARTER_BYTES;
                            bulk_copy(to + lane * QUARTER_STRIDE, from, QUARTER_BYTES, bar);
                        } else if (kind == 1 && lane < 8) {
                            const u8* from = (const u8*)(values + block) + lane * OCTET_BYTES;
                            bulk_copy(to + lane * OCTET_STRIDE, from, OCTET_BYTES, bar);
                        }
                        n++;
                    }
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

// What a warp knows of its rows 16 tile + g + 8 half.
struct Rows {
    u32 start[TILES][2], end[TILES][2]; // visible keys; none for rows that are not there
    u32 first_start, last_start, first_end, last_end; // least and greatest of both
};

__device__ __forceinline__ Rows rows_of(const Item& item) {
    Rows rows;
    u32 pos = item.step.pos + item.row, last = pos + item.rows - 1;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = (16 * tile + 8 * half + threadIdx.x % 32 / 4) / GROUP;
            rows.start[tile][half] = start_of(pos + row);
            rows.end[tile][half] = row < item.rows ? end_of(item.step, pos + row) : 0;
        }
    }
    rows.first_start = start_of(pos), rows.last_start = start_of(last);
    rows.first_end = end_of(item.step, pos), rows.last_end = end_of(item.step, last);
    return rows;
}

__device__ void load_queries(Shared& shared, const Item& item, const float* q) {
    for (u32 i = threadIdx.x; i < 16 * TILES * (DIM / 4); i += CONSUMERS) {
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

// Scores of 16 keys of a page, from `key`. Elements 0 .. 3 of a half: keys 4t .. 4t + 3 of row g + 8 half.
__device__ __forceinline__ void score(
    float (&s)[TILES][2][4], const Shared& shared, const u8* unit, u32 key, float scale) {
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float d[TILES][2][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 8; i++) d[tile][i / 4][i % 4] = 0.0f;
    const u8* words = unit + t * QUARTER_STRIDE + (key + 2 * g) * 4;
    const u32* queries = &shared.queries[g][t * QUERY_QUARTER];
#pragma unroll 4
    for (int step = 0; step < DIM / 16; step++) {
        uint2 x = *(const uint2*)(words + 2 * step * PAGE_TOKENS * 4);
        uint2 y = *(const uint2*)(words + (2 * step + 1) * PAGE_TOKENS * 4);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint2 upper = *(const uint2*)(queries + 16 * tile * QUERY_ROW + 2 * step);
            uint2 lower = *(const uint2*)(queries + (16 * tile + 8) * QUERY_ROW + 2 * step);
            u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
            mma_bf16(d[tile][0], a, x.x, y.x);
            mma_bf16(d[tile][1], a, x.y, y.y);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[tile][half][i] = d[tile][i % 2][2 * half + i / 2] * scale;
}

// Values that no row sees become zeros: their weights are zero, but they may be NaN. Values that only some
// rows see and that are not finite are added here and become zeros as well. Just this warp's columns.
__device__ __forceinline__ void clean_values(
    u8* unit, u32 page, const Rows& rows, const Shared& shared, u32 page_in_pair,
    float (&sums)[TILES][OWN_SPANS][2][4]) {
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
            bool seen = pos >= rows.first_start && pos < rows.last_end;
            if (!seen) *at = make_uint4(0, 0, 0, 0);
            else if (pos < rows.last_start || pos >= rows.first_end) {
                uint4 v = *at;
                bad |= not_finite(v.x) || not_finite(v.y) || not_finite(v.z) || not_finite(v.w);
            }
        }
        if (!__any_sync(WARP_ALL, bad)) continue;
        for (u32 key = 0; key < PAGE_TOKENS; key++) {
            u32 pos = first + key;
            bool seen = pos >= rows.first_start && pos < rows.last_end;
            if (!seen || (pos >= rows.last_start && pos < rows.first_end)) continue;
            u16* at = (u16*)(unit + key / 8 * OCTET_STRIDE + key % 8 * DIM * 2 + span * 32);
            u32 column = page_in_pair * 64 + key % 8 * 8 + key / 8;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float v = bf16_to_f32(at[8 * (i / 4) + 2 * t + i % 2]);
                if ((__float_as_uint(v) & 0x7f800000) != 0x7f800000) continue;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    int half = i % 4 / 2;
                    float weight = bf16_to_f32(((const u16*)shared.weights[16 * tile + 8 * half + g])[column]);
                    if (pos >= rows.start[tile][half] && pos < rows.end[tile][half])
                        sums[tile][own][i / 4][i % 4] += weight * v;
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

// sums += weights · values, for one page and this warp's columns. Step i takes keys 8k + 2i and 8k + 2i + 1.
__device__ __forceinline__ void add_values(
    float (&sums)[TILES][OWN_SPANS][2][4], const Shared& shared, const u8* unit, u32 page_in_pair) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 values = shared_address(unit) + lane % 8 * OCTET_STRIDE + lane / 8 % 2 * DIM * 2 + lane / 16 * 16;
    u32 weights = shared_address(shared.weights[lane % 16]) + page_in_pair * 128 + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 a[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            load_matrices(a[tile], weights + 16 * tile * WEIGHT_ROW + 32 * step);
#pragma unroll
        for (int own = 0; own < OWN_SPANS; own++) {
            u32 span = warp + WARPS * own;
            if (SPANS % WARPS != 0 && span >= SPANS) continue;
            u32 b[4];
            load_matrices_transposed(b, values + 2 * step * DIM * 2 + span * 32);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                mma_bf16(sums[tile][own][0], a[tile], b[0], b[1]);
                mma_bf16(sums[tile][own][1], a[tile], b[2], b[3]);
            }
        }
    }
}

// e^x in base 2 for x = a - b, where -inf - -inf counts as -inf.
__device__ __forceinline__ float exp2_of_difference(float a, float b) {
    return exp2_fast(a - (b == NEG_INF ? 0.0f : b));
}

// A running softmax: greatest score, sum of weights.
struct Softmax {
    float max, sum;
};

// Turns scores into weights relative to the row's new maximum, and leaves them in shared memory. `factor`:
// what the sums so far are multiplied by.
__device__ __forceinline__ void weigh(
    float (&s)[TILES][2][4], Shared& shared, Softmax (&state)[TILES][2], float (&factor)[TILES][2]) {
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float(&x)[4] = s[tile][half];
            float max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
            max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, 1));
            max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, 2));
            if (t == 0) shared.maxima[16 * tile + 8 * half + g][warp] = max;
        }
    }
    barrier(1, CONSUMERS);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 m = 16 * tile + 8 * half + g;
            const float4* maxima = (const float4*)shared.maxima[m];
            float4 a = maxima[0], b = maxima[1];
            float max = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
            Softmax& row = state[tile][half];
            max = fmaxf(max, row.max);
            factor[tile][half] = exp2_of_difference(row.max, max);
            row.max = max;
            float(&x)[4] = s[tile][half];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = exp2_of_difference(x[i], max);
            u32 low = pack_bf16(x[0], x[1]), high = pack_bf16(x[2], x[3]);
            float sum = (bf16_to_f32((u16)low) + bf16_to_f32(low >> 16)) +
                        (bf16_to_f32((u16)high) + bf16_to_f32(high >> 16));
            row.sum = __fmaf_rn(row.sum, factor[tile][half], sum);
            // Key 16w + 4t + i of a page lies in column 8 (4 (t % 2) + i) + 2w + t / 2: a word holds keys 8 apart.
            u32 keep = t < 2 ? low : high;
            u32 got = __shfl_xor_sync(WARP_ALL, t < 2 ? high : low, 2);
            u32 even = t < 2 ? keep : got, odd = t < 2 ? got : keep;
            u32* words = (u32*)shared.weights[m] + warp / 4 * 32 + (4 * (t % 2) + t / 2 * 2) * 4 + warp % 4;
            words[0] = __byte_perm(even, odd, 0x5410);
            words[4] = __byte_perm(even, odd, 0x7632);
        }
    }
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

// One chunk: greatest score and sum of weights of each row, and the weighted sum of values.
__device__ __forceinline__ void attend(
    Shared& shared, const Item& item, const Rows& rows, u32 chunk, u32& n, float scale,
    Softmax (&state)[TILES][2], float (&sums)[TILES][OWN_SPANS][2][4], const u16* keys, const u16* values,
    const u32* pool_pages) {
    u32 warp = threadIdx.x / 32, t = threadIdx.x % 4;
    u32 first, end;
    pages_of(item, chunk, first, end);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) state[tile][half].max = NEG_INF, state[tile][half].sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8 * OWN_SPANS; i++) sums[tile][i / 8][i / 4 % 2][i % 4] = 0.0f;
    }
    for (u32 pair = first & ~1u; pair < end; pair += 2) {
        u32 low = max(pair, first), high = min(pair + 2, end);
#if !PIPELINED
        __syncthreads();
        for (u32 page = low; page < high; page++)
            copy_page(shared.units[page - low], keys + ((u64)pool_pages[page] * KV_HEADS + item.kv_head) * PAGE_TOKENS * DIM,
                      QUARTER_BYTES, QUARTER_STRIDE);
        __syncthreads();
        n = 0;
#endif
        float s[TILES][2][4], factor[TILES][2];
        u32 page = pair + warp / 4, key = warp % 4 * 16;
        if (page >= low && page < high) {
            const u8* unit = open_unit(shared, n + page - low);
            score(s, shared, unit, key, scale);
            u32 from = page * PAGE_TOKENS;
            if (from < rows.last_start || from + PAGE_TOKENS > rows.first_end) {
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        u32 half = i / 4, pos = from + key + 4 * t + i % 4;
                        if (pos < rows.start[tile][half] || pos >= rows.end[tile][half])
                            s[tile][half][i % 4] = NEG_INF;
                    }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8 * TILES; i++) s[i / 8][i / 4 % 2][i % 4] = NEG_INF;
        }
        for (u32 i = low; i < high; i++) close_unit(shared, n++);
        weigh(s, shared, state, factor);
#if !PIPELINED
        for (u32 page = low; page < high; page++)
            copy_page(shared.units[page - low], values + ((u64)pool_pages[page] * KV_HEADS + item.kv_head) * PAGE_TOKENS * DIM,
                      OCTET_BYTES, OCTET_STRIDE);
        __syncthreads();
        n = 0;
#endif
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 8 * OWN_SPANS; i++)
                sums[tile][i / 8][i / 4 % 2][i % 4] *= factor[tile][i % 4 / 2];
        for (u32 page = low; page < high; page++, n++) {
            u8* unit = open_unit(shared, n);
            u32 from = page * PAGE_TOKENS;
            if (from < rows.last_start || from + PAGE_TOKENS > rows.first_end)
                clean_values(unit, page, rows, shared, page - pair, sums);
            add_values(sums, shared, unit, page - pair);
            close_unit(shared, n);
        }
    }
    // Sums of weights, over the keys' threads and warps.
    u32 g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state[tile][half].sum;
            sum += __shfl_xor_sync(WARP_ALL, sum, 1);
            sum += __shfl_xor_sync(WARP_ALL, sum, 2);
            if (t == 0) shared.totals[16 * tile + 8 * half + g][warp] = sum;
        }
    }
    barrier(1, CONSUMERS);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4* totals = (const float4*)shared.totals[16 * tile + 8 * half + g];
            float4 a = totals[0], b = totals[1];
            state[tile][half].sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
        }
    }
}

// total = total ⊕ chunk; returns the factors of their sums of values.
__device__ __forceinline__ float2 fold(Softmax& total, Softmax chunk) {
    float max = fmaxf(total.max, chunk.max);
    float2 by = make_float2(exp2_of_difference(total.max, max), exp2_of_difference(chunk.max, max));
    total.sum = __fmaf_rn(total.sum, by.x, chunk.sum * by.y);
    total.max = max;
    return by;
}

// Where scratch holds the results of an item: (max, sum) of each row, and after those of all items the
// sums of values.
__device__ __forceinline__ Softmax* softmax_of(float* scratch, u32 item) {
    return (Softmax*)scratch + (u64)item * M;
}
__device__ __forceinline__ float* sums_of(float* scratch, u32 capacity, u32 item) {
    return scratch + ((u64)capacity * 2 + (u64)item * DIM) * M;
}

__device__ __forceinline__ bool sees_chunk(const LaneStep& step, u32 pos, u32 chunk) {
    return start_of(pos) / CHUNK <= chunk && chunk <= (end_of(step, pos) - 1) / CHUNK;
}

__device__ __forceinline__ bool one_chunk(const LaneStep& step, u32 pos) {
    return start_of(pos) / CHUNK == (end_of(step, pos) - 1) / CHUNK;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) split(
    const float* q, const u16* keys, const u16* values, const u32* table, const LaneStep* steps, float* out,
    float* scratch, u32 count, u32 max_pages, u32 capacity, float scale) {
    extern __shared__ __align__(128) u8 raw[];
    Shared& shared = *(Shared*)raw;
    launch_next();
#if PIPELINED
    if (threadIdx.x == 0) {
        for (int i = 0; i < UNITS; i++) {
            phase_init(shared_address(&shared.full[i]), 1);
            phase_init(shared_address(&shared.empty[i]), WARPS);
        }
        phase_init_fence();
    }
    __syncthreads();
#endif
    wait();
    bool split = items_before(steps, count) <= capacity;
    Items items = {steps, count, blockIdx.x, 0, 0, split};
#if PIPELINED
    if (threadIdx.x >= CONSUMERS) return produce(shared, items, keys, values, table, max_pages);
#endif
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = 0;
    Item item;
    for (u32 index = blockIdx.x; items.next(item); index += gridDim.x) {
        load_queries(shared, item, q);
        barrier(1, CONSUMERS);
        Rows rows = rows_of(item);
        const u32* pool_pages = table + (u64)item.step.slot * max_pages;
        Softmax total[TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) total[i / 2][i % 2].max = NEG_INF, total[i / 2][i % 2].sum = 0.0f;
        for (u32 chunk = 0; chunk < item.chunks; chunk++) {
            Softmax state[TILES][2];
            float part[TILES][OWN_SPANS][2][4];
            attend(shared, item, rows, item.chunk + chunk, n, scale, state, part, keys, values, pool_pages);
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
                    // Between chunks the sums wait in `out`.
                    bool whole = !split || one_chunk(item.step, pos);
                    u64 head = (u64)(item.step.row0 + item.row + row) * HEADS + item.kv_head * GROUP + m % GROUP;
                    float* to = whole ? out + head * DIM : sums_of(scratch, capacity, index) + m * DIM;
                    float divisor = whole && last ? of.sum : 1.0f;
#pragma unroll
                    for (int i = 0; i < 2 * OWN_SPANS; i++) {
                        u32 span = warp + WARPS * (i / 2);
                        if (SPANS % WARPS != 0 && span >= SPANS) continue;
                        const float(&x)[4] = part[tile][i / 2][i % 2];
                        float2* at = (float2*)(to + span * 16 + i % 2 * 8 + 2 * t);
                        float2 sum = chunk == 0 ? make_float2(0.0f, 0.0f) : *at;
                        sum.x = __fmaf_rn(sum.x, by.x, x[2 * half] * by.y) / divisor;
                        sum.y = __fmaf_rn(sum.y, by.x, x[2 * half + 1] * by.y) / divisor;
                        *at = sum;
                    }
                    if (!whole && warp == 0 && t == 0) softmax_of(scratch, index)[m] = of;
                }
            }
        }
    }
}

// Folds the chunks of one row and head, in ascending order. Four columns to a thread.
extern "C" __global__ void __launch_bounds__(64) combine(
    const LaneStep* steps, float* out, const float* scratch, u32 count, u32 capacity) {
    launch_next();
    wait();
    u32 row = blockIdx.x, head = blockIdx.y, column = 4 * threadIdx.x;
    u32 lane = lane_of(steps, count, row);
    if (lane == count || items_before(steps, count) > capacity) return;
    LaneStep step = steps[lane];
    u32 r = row - step.row0, pos = step.pos + r;
    if (one_chunk(step, pos)) return;
    Span span = span_of(step);
    u32 first = start_of(pos) / CHUNK, last = (end_of(step, pos) - 1) / CHUNK;
    u32 item = items_before(steps, lane) +
               ((first - span.first) * KV_HEADS + head / GROUP) * span.groups + r / ROWS;
    u32 m = r % ROWS * GROUP + head % GROUP, stride = KV_HEADS * span.groups;
    if (column >= DIM) return;
    Softmax total = {NEG_INF, 0.0f};
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (u32 chunk = first; chunk <= last; chunk++, item += stride) {
        Softmax part = softmax_of((float*)scratch, item)[m];
        float4 x = *(const float4*)(sums_of((float*)scratch, capacity, item) + m * DIM + column);
        float2 by = fold(total, part);
        sum.x = __fmaf_rn(sum.x, by.x, x.x * by.y), sum.y = __fmaf_rn(sum.y, by.x, x.y * by.y);
        sum.z = __fmaf_rn(sum.z, by.x, x.z * by.y), sum.w = __fmaf_rn(sum.w, by.x, x.w * by.y);
    }
    float4 result = make_float4(sum.x / total.sum, sum.y / total.sum, sum.z / total.sum, sum.w / total.sum);
    *(float4*)(out + ((u64)row * HEADS + head) * DIM + column) = result;
}
