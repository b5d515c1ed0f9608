// The product of more rows than one as a stage of a chain: out[rows, n] (+)= x[rows, k] W[n, k]^T, weights read once.
// shapes   x bf16, up to WIDE rows; W in the order of fragments.rs; out f32; k a multiple of 64 and of the span
// traffic  the weights once; x once for each pass of MOST_TILES half tiles and block, from L2
// source   definition: mod.rs reference()
//
// Each row has the bits that product.cuh gives it: there, a warp has the sum of every eighth 64 inputs, and those of the eight warps are
// added in order. Here, a block's two warpgroups have two of these sums at a time, of all its half tiles, first 0 and 1, then 2 and 3, and
// add what they have to what lies in shared memory, in turns. A unit, 64 inputs of a half tile, starts from 0 and is scaled when it is
// done; both kinds of matrix instruction round alike.
//
// Work. A warp has every fourth half tile. While the tensor cores have one, it makes operands of the next and scales the one before.
// One warp copies weights: it runs ahead into the next product. Three bring panels: 128 inputs of all rows, 64 for each
// warpgroup. They take turns, scale what they bring for fragments.rs, and add up what biases are multiplied with.
//
// Defines: those of weight.cuh; WIDE, 32 or 64 rows; RING.

#define PANEL_BYTES (WIDE * 128)  // of one warpgroup
#define PANELS (WIDE == 64 ? 6 : 8)  // pairs
#define PANELS_AHEAD 2  // of each of the warps that bring them
#define BRINGERS 3
#define MOST_TILES (WIDE == 64 ? 12 : 18)
#define MOST_OWN 3  // half tiles that a block stores of a run whose k is split; such a run has twice as many at most
#define PAIR_BYTES (SPAN > 64 ? HEADER_BYTES + 2 * UNIT_BYTES : 2 * HEADERS * SPAN_BYTES)
#define SLOT_BYTES (MOST_TILES * PAIR_BYTES)
#define TILE_BYTES (WIDE * 64)  // sums of a half tile

// Shared memory, in this order, from a multiple of 1024 on.
#define TOTALS_AT (PANELS * 2 * PANEL_BYTES)
#define SUMS_AT (TOTALS_AT + PANELS * 2 * SUBS * WIDE * 4)
#define CROSS_AT (SUMS_AT + (MOST_TILES - MOST_OWN) * TILE_BYTES)
#define RING_AT (SUMS_AT + MOST_TILES * TILE_BYTES)
#define BARS_AT (RING_AT + RING * SLOT_BYTES)

// The order in which a block's units are added, two at a time: units 8 chunk + sum and the next one. Again for each pass.
struct Order {
    u32 chunk0, units, length, count;  // length: chunks, of which the last may have less than eight units; count: of pairs
    u32 sum, place;                    // sum: an even one
    __device__ __forceinline__ explicit Order(const Product& p) {
        chunk0 = p.chunk0, units = min(p.k / 64, p.chunk1 * 8), length = p.chunk1 - chunk0;
        count = 4 * (length - 1) + (units - (p.chunk1 - 1) * 8 + 1) / 2, sum = place = 0;
    }
    __device__ __forceinline__ u32 unit() const { return (chunk0 + place) * 8 + sum; }
    __device__ __forceinline__ bool whole() const { return unit() + 1 < units; }
    // Whether that was the last pair of its sums.
    __device__ __forceinline__ bool next() {
        if (++place < length && unit() < units) return false;
        place = 0, sum += 2;
        if (sum == 8 || unit() >= units) sum = 0;
        return true;
    }
};

// Fills the ring: each slot with as many pairs of a pass as fit. By a warp, a pair of a half tile a lane.
__device__ __forceinline__ void copy_weights(const Product& p, Ring& ring, u32 lane, u64 policy) {
    const u32 of_slot = MOST_TILES / p.tiles, row_bytes = p.k / SPAN * SPAN_BYTES;
    for (u32 first = 0; first < p.run; first += p.tiles) {
        const u32 tiles = min(p.tiles, p.run - first), of_lane = lane / tiles, tile = p.tile0 + first + lane % tiles;
        const u8* row = p.w[0];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (tile >= p.first[i]) row = p.w[i] + (u64)(tile - p.first[i]) * row_bytes;
        const u32 to = ring.base + (of_lane * p.tiles + lane % tiles) * PAIR_BYTES;
        Order order(p);  // of the lane's pairs
        for (u32 i = 0; i < of_lane; i++) order.next();
        for (u32 at = 0; at < order.count; at += of_slot, ring.next()) {
            phase_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1);
            const u32 bar = ring.full + 8 * ring.slot, slot = to + ring.slot * SLOT_BYTES;
            const bool mine = of_lane < of_slot && at + of_lane < order.count;
            const u32 bytes = !mine ? 0 : order.whole() ? PAIR_BYTES : PAIR_BYTES / 2;  // half a pair has no header of its own
            const u32 all = __reduce_add_sync(WARP_ALL, bytes);
            if (lane == 0) phase_arrive_expecting(bar, all);
            __syncwarp();
            if (mine) {
                const u8* from = row + order.unit() / UNITS_OF_SPAN * HEADERS * SPAN_BYTES;
                if constexpr (SPAN > 128) {
                    bulk_copy_once(slot, from, HEADER_BYTES, bar, policy);
                    bulk_copy_once(slot + HEADER_BYTES, from + HEADER_BYTES + order.unit() % UNITS_OF_SPAN * UNIT_BYTES, 2 * UNIT_BYTES, bar, policy);
                } else bulk_copy_once(slot, from, bytes, bar, policy);
            }
            for (u32 i = 0; i < of_slot; i++) order.next();
            __syncwarp();
        }
    }
}

// Panels in shared memory. Their barriers are one after the other, like the ring's.
struct Panels {
    u32 base, full, empty, passed;  // passed: panels of the stages before
    __device__ __forceinline__ u32 slot(u32 at) const { return (passed + at) % PANELS; }
    __device__ __forceinline__ u32 parity(u32 at) const { return (passed + at) / PANELS & 1; }
};

// Brings every BRINGERS-th pair of panels. By a warp.
__device__ __forceinline__ void bring_panels(const Product& p, Panels& panels, u32 bringer, u32 lane) {
    Order order(p);
    const u32 all = (p.run + p.tiles - 1) / p.tiles * order.count, my_first = (bringer + BRINGERS - panels.passed % BRINGERS) % BRINGERS;
    const u32 row0 = lane / 8, piece = lane % 8, lane_at = panel_at(row0, piece), by = piece % 2 ? X_HIGH : X_LOW;
    for (u32 i = 0; i < my_first; i++) order.next();
    u32 fetched = my_first, fetched_slot = panels.slot(my_first), fetched_parity = panels.parity(my_first);
    auto fetch = [&]() {
        if (fetched < all) {
            phase_wait(panels.empty + 8 * fetched_slot, fetched_parity ^ 1);
            const u8* from = p.x + row0 * p.x_stride + order.unit() * 128 + piece * 16;
            const u32 to = panels.base + fetched_slot * 2 * PANEL_BYTES + lane_at;
            const bool whole = order.whole();
#pragma unroll
            for (u32 i = 0; i < WIDE / 4; i++, from += 4 * p.x_stride)  // rows 4 further on: the pieces of half of them change places
                if (row0 + 4 * i < p.rows) {
                    const u32 there = i % 2 ? (to + i * 512) ^ 64 : to + i * 512;
                    copy16(there, from, 16);
                    if (whole) copy16(there + PANEL_BYTES, from + 128, 16);
                }
        }
        copies_commit();
        fetched += BRINGERS, fetched_slot += BRINGERS;
        if (fetched_slot >= PANELS) fetched_slot -= PANELS, fetched_parity ^= 1;
#pragma unroll 1
        for (u32 i = 0; i < BRINGERS; i++) order.next();
    };
    u32 slot = fetched_slot;
#pragma unroll
    for (u32 i = 0; i < PANELS_AHEAD; i++) fetch();
#pragma unroll 1
    for (u32 at = my_first; at < all; at += BRINGERS) {
        copies_wait<PANELS_AHEAD - 1>();
        u32 a[4];
        ones(a);
#pragma unroll 1
        for (u32 r = 0; r < WIDE / 16; r++) {  // 32 rows of a panel
            const u32 half = r % 2, row = r / 2 * 32, panel = panels.base + (slot * 2 + half) * PANEL_BYTES + row * 128;
            // A lane scales what it copied. Rows that are not there are zeros.
            u32 v[8][4];
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3])
                             : "r"(i % 2 ? (panel + lane_at + i * 512) ^ 64 : panel + lane_at + i * 512));
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const bool there = row + i * 4 + row0 < p.rows;
#pragma unroll
                for (int e = 0; e < 4; e++) v[i][e] = there ? mul_bf16x2(v[i][e], by) : 0;
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(i % 2 ? (panel + lane_at + i * 512) ^ 64 : panel + lane_at + i * 512),
                             "r"(v[i][0]), "r"(v[i][1]), "r"(v[i][2]), "r"(v[i][3])
                             : "memory");
            }
            __syncwarp();
            u32 b[4][4][2];
            float total[4][SUBS][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) load_matrices(b[i][2 * h], b[i][2 * h + 1], panel + i * 1024 + panel_at(lane % 8, h * 4 + lane / 8));
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) mma(total[i][j * SUBS / 4], a, b[i][j][0], b[i][j][1]);
            const u32 to = panels.base + TOTALS_AT + ((slot * 2 + half) * SUBS * WIDE + row + 2 * lane) * 4;
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int s = 0; s < SUBS; s++)
                    if (lane < 4)
                        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (s * WIDE + i * 8) * 4), "f"(total[i][s][0]), "f"(total[i][s][1]) : "memory");
        }
        fence_shared_async();
        __syncwarp();
        if (lane == 0) phase_arrive(panels.full + 8 * slot);
        slot = slot + BRINGERS >= PANELS ? slot + BRINGERS - PANELS : slot + BRINGERS;
        fetch();
    }
    copies_wait<0>();
    panels.passed += all;
}

// What a block's computing warps keep from stage to stage.
struct Block {
    u8* shared;  // from a multiple of 1024 on
    Ring ring;
    Panels panels;
    u32 warp, lane, cross, cross_parity;
};

// Warpgroups take turns in adding to the sums in shared memory: the first waits for 4, the second for 3.
__device__ __forceinline__ void turn_begins(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(4 - group) : "memory"); }
__device__ __forceinline__ void turn_ends(u32 group) { asm volatile("bar.arrive %0, 256;" ::"r"(3 + group) : "memory"); }

// The sums of a pass of `tiles` half tiles, into shared memory; MINE of a warp.
template <int MINE>
__device__ __forceinline__ void sums_of_pass(const Product& p, Order order, u32 tiles, Block& block) {
    constexpr int OF_STEP = 4 / SUBS, STEPS = MINE * SUBS, RAWS = WIDE == 32 && MINE < 5 ? 2 : 1;
    const u32 group = block.warp / 4, warp = block.warp % 4, lane = block.lane, t = lane % 4, of_slot = MOST_TILES / p.tiles;
    float sum[MINE][WIDE / 2], raw[RAWS][WIDE / 2];
    u32 operand[2][OF_STEP][4];
    Unit unit;
    float scale[RAWS + 1][2], bias[RAWS + 1][2];
    Ring& ring = block.ring;
    u32 in_slot = 0, at = 0, panel = block.panels.slot(0), parity = block.panels.parity(0);
    const u8 *const cells = block.shared + RING_AT + warp * PAIR_BYTES + lane * 16, *cell = cells + ring.slot * SLOT_BYTES;
    const u64 panel0 = rows_along(block.panels.base) + group * (PANEL_BYTES / 16);
    const float2* const totals0 = (const float2*)(block.shared + TOTALS_AT) + group * (SUBS * WIDE / 2) + t;

    auto arrive_at_pair = [&]() {
        if (in_slot == 0) phase_wait(ring.full + 8 * ring.slot, ring.parity);
        phase_wait(block.panels.full + 8 * panel, parity);
    };
    // Makes the operands of step q. Step: a part with one scale of a unit of half tile warp + 4 m.
    auto take = [&](u32(&to)[OF_STEP][4], int q) {
        const int m = q / SUBS, s = q % SUBS;
        if (s == 0) {
            const u8* pair = cell + 4 * m * PAIR_BYTES - lane * 16;
            const u8 *header = SPAN > 64 ? pair : pair + group * HEADERS * SPAN_BYTES, *codes = header + HEADER_BYTES + (SPAN > 64 ? group * UNIT_BYTES : 0);
            if (warp + 4 * m < tiles) load_unit(unit, header, codes, SPAN > 64 ? (order.sum + group) % UNITS_OF_SPAN : 0, lane);
        }
#pragma unroll
        for (int j = 0; j < OF_STEP; j++) codes_of_step(to[j], unit, s * OF_STEP + j);
        scales(unit, s, scale[q % (RAWS + 1)], bias[q % (RAWS + 1)]);
        keep(to);  // now, not when they are needed
    };
    arrive_at_pair();
    take(operand[0], 0);
#pragma unroll 1
    for (u32 pair_sum = 0; pair_sum < 8; pair_sum += 2) {
#pragma unroll
        for (int m = 0; m < MINE; m++)
#pragma unroll
            for (int i = 0; i < WIDE / 2; i++) sum[m][i] = 0.f;
        bool last = at == order.count;  // short products have less than eight sums
#pragma unroll 1
        while (!last) {
            const bool mine = group == 0 || order.whole();
            const u64 operand_at = panel0 + panel * (2 * PANEL_BYTES / 16);
            const float2* totals = totals0 + panel * (SUBS * WIDE);
            const u32 bar = block.panels.empty + 8 * panel;
            auto start = [&](int q) {
                u32(&a)[OF_STEP][4] = operand[q % 2];
                keep(a), keep(raw[q % RAWS]);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < OF_STEP; j++) wgmma(raw[q % RAWS], a[j], operand_at + 2 * (q % SUBS * OF_STEP + j), j > 0);  // 32 bytes a step
                wgmma_commit();
            };
            auto scaled = [&](int q) {
                keep(operand[q % 2]), keep(raw[q % RAWS]);
                const float(&scale_now)[2] = scale[q % (RAWS + 1)], (&bias_now)[2] = bias[q % (RAWS + 1)];
#pragma unroll
                for (int i = 0; i < WIDE / 2; i += 2) {
                    const float2 total = totals[q % SUBS * WIDE / 2 + i / 4 * 4];
                    float(&to)[WIDE / 2] = sum[q / SUBS];
                    to[i] = fmaf(scale_now[i / 2 % 2], raw[q % RAWS][i], fmaf(bias_now[i / 2 % 2], total.x, to[i]));
                    to[i + 1] = fmaf(scale_now[i / 2 % 2], raw[q % RAWS][i + 1], fmaf(bias_now[i / 2 % 2], total.y, to[i + 1]));
                }
            };
            if (mine) {
#pragma unroll
                for (int q = 0; q < STEPS; q++) {
                    start(q);
                    if (RAWS == 2 && q > 0) wgmma_wait<1>(), scaled(q - 1);
                    if (q + 1 < STEPS) take(operand[(q + 1) % 2], q + 1);
                    if (RAWS == 1) wgmma_wait<0>(), scaled(q);
                }
                if (RAWS == 2) wgmma_wait<0>(), scaled(STEPS - 1);
            }
            __syncwarp();
            if (lane == 0) phase_arrive(bar);
            last = order.next(), at++, cell += p.tiles * PAIR_BYTES;
            if (++in_slot == of_slot || at == order.count) {
                if (lane == 0) phase_arrive(ring.empty + 8 * ring.slot);
                ring.next(), in_slot = 0, cell = cells + ring.slot * SLOT_BYTES;
            }
            if (++panel == PANELS) panel = 0, parity ^= 1;
            if (at < order.count) {
                arrive_at_pair();
                take(operand[0], 0);
            }
        }
        turn_begins(group);
#pragma unroll
        for (int m = 0; m < MINE; m++)
            if (warp + 4 * m < tiles) {
                float* done = (float*)(block.shared + SUMS_AT + (warp + 4 * m) * TILE_BYTES) + lane;
#pragma unroll
                for (int c = 0; c < WIDE / 2; c += 8) {  // loads first: each takes long
                    float before[8];
                    if (pair_sum + group)
#pragma unroll
                        for (int i = 0; i < 8; i++) before[i] = done[32 * (c + i)];
#pragma unroll
                    for (int i = 0; i < 8; i++) done[32 * (c + i)] = pair_sum + group ? before[i] + sum[m][c + i] : sum[m][c + i];
                }
            }
        if (pair_sum < 6 || group == 0) turn_ends(group);
    }
}

__device__ __forceinline__ void wide_product(const Product& p, const u64* word, Block& block) {
    const Order order(p);
    const u32 lane = block.lane, g = lane / 4, t = lane % 4, rank = blockIdx.x % 2;
    for (u32 first = 0; first < p.run; first += p.tiles) {
        const u32 tiles = min(p.tiles, p.run - first);
        switch ((tiles + 3) / 4) {
        case 1: sums_of_pass<1>(p, order, tiles, block); break;
        case 2: sums_of_pass<2>(p, order, tiles, block); break;
        case 3: sums_of_pass<3>(p, order, tiles, block); break;
#if WIDE == 32
        default: sums_of_pass<5>(p, order, tiles, block);
#endif
        }
        block.panels.passed += order.count;
        barrier(1, 32 * WARPS);

        auto sums_at = [&](u32 at, u32 tile) { return (float*)(block.shared + at + tile * TILE_BYTES) + lane; };
        if (p.split > 1) {
            for (u32 tile = block.warp; tile < tiles; tile += WARPS) {
                if (tile % 2 == rank) continue;
                const float* from = sums_at(SUMS_AT, tile);
                const u32 to = in_block(shared_address(sums_at(CROSS_AT, tile / 2)), rank ^ 1);
#pragma unroll 8
                for (int i = 0; i < WIDE / 2; i++) asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + 128 * i), "f"(from[32 * i]) : "memory");
            }
            __syncwarp();
            if (lane == 0)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(block.cross, rank ^ 1)) : "memory");
            phase_wait_cluster(block.cross, block.cross_parity);
            block.cross_parity ^= 1;
        }
        for (u32 tile = block.warp; tile < tiles; tile += WARPS) {
            if (p.split > 1 && tile % 2 != rank) continue;
            const float *sums = sums_at(SUMS_AT, tile), *others = sums_at(CROSS_AT, tile / 2);
            u32 part = 0, before = 0;
#pragma unroll
            for (int i = 1; i < 4; i++)
                if (p.tile0 + first + tile >= p.first[i]) part = i, before = p.first[i];
            const u32 o = (p.tile0 + first + tile - before) * 16 + g, n = word[9 + 3 * part];
            float* out = (float*)word[8 + 3 * part] + o;
            const bool old = (u32)word[4] >> part & 1;
#pragma unroll 1
            for (int i = 0; i < WIDE / 2; i += 8) {  // 16 rows
                float v[8], is[8];
                auto there = [&](int e) { return (i + e) / 4 * 8 + 2 * t + e % 2 < p.rows && o + e / 2 % 2 * 8 < n; };
                auto place = [&](int e) { return (u64)((i + e) / 4 * 8 + 2 * t + e % 2) * n + e / 2 % 2 * 8; };
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    is[e] = old && there(e) ? out[place(e)] : 0.f, v[e] = sums[32 * (i + e)];
                    if (p.split > 1) v[e] = rank ? others[32 * (i + e)] + v[e] : v[e] + others[32 * (i + e)];
                }
#pragma unroll
                for (int e = 0; e < 8; e++)
                    if (there(e)) out[place(e)] = fmaf(v[e], UNSCALE, is[e]);
            }
        }
        if (block.warp >= 4) turn_ends(1);
    }
}
