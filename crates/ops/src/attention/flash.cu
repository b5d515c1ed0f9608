// Attention of a prompt's rows on the matrix units of Hopper (arXiv 2205.14135, 2407.08608). All query heads that share a
// key/value head are rows of one product: row m of a lane's tiles is head m % GROUP of its row m / GROUP. A block
// has 128 of them, 64 to each of two warpgroups, and goes through the pages that they see in ascending order; a
// third warpgroup copies pages. While the products with a page's values run, its warpgroup computes the scores of
// the next page, and weighs them when it has them.
//
// A page is a step of the online softmax whoever runs it, and a page that a row doesn't see changes none of the
// row's bits; so they depend on positions alone.
//
// HEADS, KV_HEADS, DIM (a multiple of 128), CAUSAL, WINDOW (0: none); SHARED: bytes.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GROUP (HEADS / KV_HEADS)
#define ROWS 128
#define STAGES 2
#define COPIERS 128
#define PANELS (DIM / 64)
#define PANEL_BYTES (64 * 128)
#define PAGE_BYTES (PANELS * PANEL_BYTES)

struct Shared {
    __align__(1024) u8 queries[2][PAGE_BYTES];
    __align__(1024) u8 keys[STAGES][PAGE_BYTES];
    __align__(1024) u8 values[STAGES][PAGE_BYTES];
    u64 keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
    // Keys of a page with a value that is not finite; kept where not all rows see all keys.
    u32 spoiled[STAGES][2];
};
static_assert(sizeof(Shared) + 1024 <= SHARED, "more shared memory than was asked for");

__device__ __forceinline__ u32 piece_at(u32 row, u32 piece) {
    return piece / 8 * PANEL_BYTES + panel_at(row, piece % 8);
}

// What a block does.
struct Tile {
    LaneStep step;
    u32 kv_head;
    u32 first, rows;            // products' rows, of the lane's
    u32 first_page, last_page;  // that some row sees
    u32 last_start, first_end;  // keys from here to there all rows see
    u32 first_start, last_end;  // and outside of these none
};

__device__ __forceinline__ u32 start_of(u32 pos) {
    return WINDOW > 0 && pos + 1 > WINDOW ? pos + 1 - WINDOW : 0;
}
__device__ __forceinline__ u32 end_of(const LaneStep& step, u32 pos) {
    return CAUSAL ? pos + 1 : step.pos + step.rows;
}
__device__ __forceinline__ u32 tiles_of(const LaneStep& step) {
    return (step.rows * GROUP + ROWS - 1) / ROWS;
}

// Longest first: a lane's last tiles see most.
__device__ __forceinline__ bool find_tile(Tile& tile, const LaneStep* steps, u32 count) {
    u32 total = 0;
    for (u32 lane = 0; lane < count; lane++) total += tiles_of(steps[lane]);
    if (blockIdx.y >= total) return false;
    u32 at = total - 1 - blockIdx.y, lane = 0;
    for (; at >= tiles_of(steps[lane]); lane++) at -= tiles_of(steps[lane]);
    tile.step = steps[lane];
    tile.kv_head = blockIdx.x;
    tile.first = at * ROWS;
    tile.rows = min(tile.step.rows * GROUP - tile.first, ROWS);
    u32 pos = tile.step.pos + tile.first / GROUP, last = tile.step.pos + (tile.first + tile.rows - 1) / GROUP;
    tile.first_start = start_of(pos), tile.last_start = start_of(last);
    tile.first_end = end_of(tile.step, pos), tile.last_end = end_of(tile.step, last);
    tile.first_page = tile.first_start / PAGE_TOKENS;
    tile.last_page = (tile.last_end - 1) / PAGE_TOKENS;
    return true;
}

// Whether some row of the block does not see all of a page.
__device__ __forceinline__ bool partial(const Tile& tile, u32 page) {
    return page * PAGE_TOKENS < tile.last_start || (page + 1) * PAGE_TOKENS > tile.first_end;
}

__device__ __forceinline__ bool not_finite(u32 pair) {
    return (pair & 0x7f80) == 0x7f80 || (pair & 0x7f800000) == 0x7f800000;
}

// ---- Copies -----------------------------------------------------------------------------------

// A page of keys lies word by word (two elements of 64 keys, then the next two): four words of four keys make
// four pieces of rows. A thread's part of a page is on its way in registers for a page's time.
struct Words {
    uint4 part[DIM / 64][4];
};

// The first key and the piece of part `i`. Eight neighbours write to different banks.
__device__ __forceinline__ void place_of(u32 i, u32 thread, u32& key, u32& piece) {
    u32 lane = thread % 32, at = i * (COPIERS / 32) + thread / 32;
    key = 4 * (lane % 2 + lane / 8 * 2) + at % 2 * 32;
    piece = lane / 2 % 4 + at / 2 * 4;
}

__device__ __forceinline__ void load_keys(Words& words, const u16* from, u32 thread) {
#pragma unroll
    for (int i = 0; i < DIM / 64; i++) {
        u32 key, piece;
        place_of(i, thread, key, piece);
        const uint4* at = (const uint4*)(from + 2 * (4 * piece * PAGE_TOKENS + key));
#pragma unroll
        for (int w = 0; w < 4; w++) words.part[i][w] = at[w * PAGE_TOKENS / 4];
    }
}

__device__ __forceinline__ void store_keys(u8* to, const Words& words, u32 thread) {
#pragma unroll
    for (int i = 0; i < DIM / 64; i++) {
        u32 k, p;
        place_of(i, thread, k, p);
        const uint4(&x)[4] = words.part[i];
        *(uint4*)(to + piece_at(k, p)) = make_uint4(x[0].x, x[1].x, x[2].x, x[3].x);
        *(uint4*)(to + piece_at(k + 1, p)) = make_uint4(x[0].y, x[1].y, x[2].y, x[3].y);
        *(uint4*)(to + piece_at(k + 2, p)) = make_uint4(x[0].z, x[1].z, x[2].z, x[3].z);
        *(uint4*)(to + piece_at(k + 3, p)) = make_uint4(x[0].w, x[1].w, x[2].w, x[3].w);
    }
}

// Values that no row sees become zeros: their weights are zero, but they may be NaN.
__device__ __forceinline__ void copy_values(u8* to, const u16* from, u32 thread, u32 seen_from, u32 seen_to) {
#pragma unroll 4
    for (u32 i = thread; i < PAGE_TOKENS * DIM / 8; i += COPIERS) {
        u32 key = i / (DIM / 8), piece = i % (DIM / 8);
        bool seen = key >= seen_from && key < seen_to;
        copy16(shared_address(to + piece_at(key, piece)), from + key * DIM + piece * 8, seen ? 16 : 0);
    }
}

// Values that only some rows see and that are not finite become zeros, and their keys are noted.
__device__ __forceinline__ void note_spoiled(u8* values, u32* spoiled, u32 thread) {
    for (u32 i = thread; i < PAGE_TOKENS * DIM / 8; i += COPIERS) {
        u32 key = i / (DIM / 8), piece = i % (DIM / 8);
        uint4* at = (uint4*)(values + piece_at(key, piece));
        uint4 v = *at;
        if (!(not_finite(v.x) || not_finite(v.y) || not_finite(v.z) || not_finite(v.w))) continue;
        *at = make_uint4(0, 0, 0, 0);
        atomicOr(&spoiled[key / 32], 1u << key % 32);
    }
}

// Hands over a page of values whose copies are done.
__device__ __forceinline__ void finish_values(Shared& shared, const Tile& tile, u32 n, u32 thread) {
    u32 stage = n % STAGES;
    if (partial(tile, tile.first_page + n)) {
        if (thread < 2) shared.spoiled[stage][thread] = 0;
        barrier(3, COPIERS);
        note_spoiled(shared.values[stage], shared.spoiled[stage], thread);
    }
    fence_shared_async();
    phase_arrive(shared_address(&shared.values_full[stage]));
}

// Nothing that a product waits for waits itself for a later product: a page's keys are stored as soon as there is
// room for them, and its values, which are wanted only after its scores, are handed over after the next page's keys,
// when they have arrived without anybody waiting. But values of a page that not all rows see are wanted together with
// its scores.
__device__ __forceinline__ void copy_pages(
    Shared& shared, const Tile& tile, const u16* keys, const u16* values, const u32* pool_pages) {
    u32 thread = threadIdx.x, pages = tile.last_page + 1 - tile.first_page;
    auto block_of = [&](u32 n) {
        return ((u64)pool_pages[tile.first_page + n] * KV_HEADS + tile.kv_head) * (PAGE_TOKENS * DIM);
    };
    bool late = false;
    Words words;
    u64 block = block_of(0);
    load_keys(words, keys + block, thread);
    for (u32 n = 0; n < pages; n++) {
        u32 stage = n % STAGES, parity = (n / STAGES & 1) ^ 1, first = (tile.first_page + n) * PAGE_TOKENS;
        phase_wait(shared_address(&shared.keys_empty[stage]), parity);
        store_keys(shared.keys[stage], words, thread);
        fence_shared_async();
        phase_arrive(shared_address(&shared.keys_full[stage]));
        u64 next = n + 1 < pages ? block_of(n + 1) : block;
        if (n + 1 < pages) load_keys(words, keys + next, thread);
        if (late) {
            copies_wait<0>();
            finish_values(shared, tile, n - 1, thread);
        }
        phase_wait(shared_address(&shared.values_empty[stage]), parity);
        u32 from = max(tile.first_start, first) - first, to = min(tile.last_end, first + PAGE_TOKENS) - first;
        copy_values(shared.values[stage], values + block, thread, from, to);
        copies_commit();
        late = n + 1 < pages && !partial(tile, tile.first_page + n);
        if (!late) {
            copies_wait<0>();
            finish_values(shared, tile, n, thread);
        }
        block = next;
    }
}

// ---- Products ---------------------------------------------------------------------------------

__device__ __forceinline__ void load_queries(u8* to, const Tile& tile, u32 first, const float* q) {
    for (u32 i = threadIdx.x % 128; i < 64 * (DIM / 8); i += 128) {
        u32 m = i / (DIM / 8), piece = i % (DIM / 8), row = (tile.first + first + m) / GROUP;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (first + m < tile.rows) {
            u32 head = tile.kv_head * GROUP + (tile.first + first + m) % GROUP;
            const float4* from = (const float4*)(q + ((u64)(tile.step.row0 + row) * HEADS + head) * DIM + piece * 8);
            float4 x = from[0], y = from[1];
            words = make_uint4(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
        }
        *(uint4*)(to + piece_at(m, piece)) = words;
    }
}

// Of a thread's two rows, g and g + 8 of its warp's 16: what they see, and their running softmax.
struct Softmax {
    u32 start[2], end[2];
    float max[2], sum[2];
};

// 2^x, to two units in the last place; 0 for what would be subnormal.
__device__ __forceinline__ float exp2_or_zero(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Scores to weights relative to the rows' new maxima. `factor`: what the sums so far are multiplied by.
__device__ __forceinline__ void weigh(
    float (&s)[32], Softmax& rows, float (&factor)[2], float scale, const Tile& tile, u32 page, const u32* spoiled) {
    u32 t = threadIdx.x % 4;
    float extra[2] = {0.0f, 0.0f};
    if (partial(tile, page)) {
        u32 bad[2] = {spoiled[0], spoiled[1]};
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int half = i / 2 % 2;
            u32 key = i / 4 * 8 + 2 * t + i % 2, pos = page * PAGE_TOKENS + key;
            bool seen = pos >= rows.start[half] && pos < rows.end[half];
            if (!seen) s[i] = NEG_INF;
            else if (bad[key / 32] >> key % 32 & 1) extra[half] = __int_as_float(0x7fffffff);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = NEG_INF;
#pragma unroll
        for (int i = 0; i < 16; i++) max = fmaxf(max, s[i / 2 * 4 + 2 * half + i % 2]);
        max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, 1));
        max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, 2));
        max = fmaxf(rows.max[half], max * scale);
        // Before the first key that a row sees, all its scores are -inf.
        float base = max == NEG_INF ? 0.0f : max;
        factor[half] = exp2_or_zero(rows.max[half] - base);
        rows.max[half] = max;
        float sum = extra[half];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float& x = s[i / 2 * 4 + 2 * half + i % 2];
            x = exp2_or_zero(__fmaf_rn(x, scale, -base));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float *x = &s[4 * i + 2 * half], lower, upper;
            u32 pair = pack_bf16(x[0], x[1]);
            lower = __uint_as_float(pair << 16), upper = __uint_as_float(pair & 0xffff0000u);
            sum += lower + upper;
        }
        rows.sum[half] = __fmaf_rn(rows.sum[half], factor[half], sum);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) flash(
    const float* q, const u16* keys, const u16* values, const u32* table, const LaneStep* steps, float* out, u32 count,
    u32 max_pages, float scale) {
    extern __shared__ u8 raw[];
    Shared& shared = *(Shared*)(raw + (1024 - shared_address(raw) % 1024) % 1024);
    u32 group = __shfl_sync(WARP_ALL, threadIdx.x / 128, 0);
    launch_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            phase_init(shared_address(&shared.keys_full[i]), COPIERS);
            phase_init(shared_address(&shared.values_full[i]), COPIERS);
            phase_init(shared_address(&shared.keys_empty[i]), 8);
            phase_init(shared_address(&shared.values_empty[i]), 8);
        }
        phase_init_fence();
    }
    __syncthreads();
    wait();
    Tile tile;
    if (!find_tile(tile, steps, count)) return;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        copy_pages(shared, tile, keys, values, table + (u64)tile.step.slot * max_pages);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");

    group--;
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, m = 64 * group + threadIdx.x % 128 / 32 * 16 + g;
    load_queries(shared.queries[group], tile, 64 * group, q);
    fence_shared_async();
    barrier(1 + group, 128);
    Softmax rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 pos = tile.step.pos + (tile.first + m + 8 * half) / GROUP;
        bool there = m + 8 * half < tile.rows;
        rows.start[half] = start_of(pos), rows.end[half] = there ? end_of(tile.step, pos) : 0;
        rows.max[half] = NEG_INF, rows.sum[half] = 0.0f;
    }
    float o[DIM / 128][64], s[32], factor[2];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) o[i / 64][i % 64] = 0.0f;
    u32 a[4][4];
    const u32 queries_at = shared_address(shared.queries[group]), keys_at = shared_address(shared.keys);
    const u32 values_at = shared_address(shared.values), pages = tile.last_page + 1 - tile.first_page;

    auto start_scores = [&](u32 n) {
        phase_wait(shared_address(&shared.keys_full[n % STAGES]), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            u32 at = i / 4 * PANEL_BYTES + i % 4 * 32;
            wgmma(s, rows_along(queries_at + at), rows_along(keys_at + n % STAGES * PAGE_BYTES + at), i > 0);
        }
        wgmma_commit();
    };
    auto start_values = [&](u32 n) {
        phase_wait(shared_address(&shared.values_full[n % STAGES]), n / STAGES & 1);
        const u32 of_page = values_at + n % STAGES * PAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < PAGE_TOKENS / 16; j++)
#pragma unroll
            for (int h = 0; h < DIM / 128; h++)
                wgmma<1>(o[h], a[j], rows_across(of_page + 2 * h * PANEL_BYTES + 2048 * j, PANEL_BYTES), 1);
        wgmma_commit();
    };
    auto leave = [&](u64* empty, u32 n) {
        if (lane == 0) phase_arrive(shared_address(&empty[n % STAGES]));
    };
    auto weights = [&](u32 n) {
        u32 page = tile.first_page + n;
        if (partial(tile, page)) phase_wait(shared_address(&shared.values_full[n % STAGES]), n / STAGES & 1);
        weigh(s, rows, factor, scale, tile, page, shared.spoiled[n % STAGES]);
    };
    auto pack = [&]() {
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[j][i] = pack_bf16(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
    };

    start_scores(0);
    wgmma_wait<0>();
    keep(s);
    leave(shared.keys_empty, 0);
    weights(0);
    pack();
    for (u32 n = 1; n < pages; n++) {
        start_scores(n);
        start_values(n - 1);
        wgmma_wait<1>();
        keep(s);
        leave(shared.keys_empty, n);
        weights(n);
        wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < DIM / 128; h++) keep(o[h]);
        keep(a);
        leave(shared.values_empty, n - 1);
        pack();
        // By 1 nothing changes.
        if (__any_sync(WARP_ALL, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
        }
    }
    start_values(pages - 1);
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < DIM / 128; h++) keep(o[h]);

#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(WARP_ALL, sum, 1);
        sum += __shfl_xor_sync(WARP_ALL, sum, 2);
        if (m + 8 * half >= tile.rows) continue;
        u32 of_lane = tile.first + m + 8 * half, head = tile.kv_head * GROUP + of_lane % GROUP;
        float* to = out + ((u64)(tile.step.row0 + of_lane / GROUP) * HEADS + head) * DIM + 2 * t;
#pragma unroll
        for (int i = 0; i < DIM / 8; i++) {
            const float* x = &o[i / 16][i % 16 * 4 + 2 * half];
            *(float2*)(to + 8 * i) = make_float2(x[0] / sum, x[1] / sum);
        }
    }
}
#endif
