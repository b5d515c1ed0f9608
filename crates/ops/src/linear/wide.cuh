// The product of more rows than one as a stage of a chain: out[rows, n] (+)= x[rows, k] W[n, k]^T, weights read once.
// shapes   x bf16, up to WIDE rows; W in the order of fragments.rs; out f32; k a multiple of 64 and of the span
// traffic  the weights once; x once for each pass of MOST_TILES half tiles and block, from L2
// source   definition: mod.rs reference()
//
// Each row has the bits that product.cuh gives it: there, a warp has the sum of every eighth 64 inputs, and those of the eight warps are
// added in order. Here, the tensor cores take the first of these sums' inputs after one another, then the next one's, and
// so on, and what is finished waits in shared memory. A unit, 64 inputs of a half tile, starts from 0 and is scaled when it is done;
// both kinds of matrix instruction round alike.
//
// Work. The half tiles of a block are dealt to its two warpgroups four at a time, one a warp. While the tensor cores have one, its
// warpgroup makes operands of the next and scales the one before. One warp copies weights: it runs ahead into the next product. Three
// bring panels: 64 inputs of all rows, each a panel in turn. They scale them for fragments.rs and add up what biases are
// multiplied with.
//
// Defines: those of weight.cuh; WIDE, 32 or 64 rows; RING.

#define PANEL_BYTES (WIDE * 128)
#define PANELS (WIDE == 64 ? 8 : 12)
#define PANELS_AHEAD 2  // of each of the warps that bring them
#define BRINGERS 3
#define MOST_TILES 18
#define MOST_OWN 3  // half tiles that a block stores of a run whose k is split; such a run has twice as many at most
#define CELL_BYTES (SPAN > 64 ? HEADER_BYTES + UNIT_BYTES : HEADERS * SPAN_BYTES)
#define SLOT_BYTES (MOST_TILES * CELL_BYTES)
#define TILE_BYTES (WIDE * 64)  // sums of a half tile

// Shared memory, in this order, from a multiple of 1024 on.
#define TOTALS_AT (PANELS * PANEL_BYTES)
#define SUMS_AT (TOTALS_AT + PANELS * SUBS * WIDE * 4)
#define CROSS_AT (SUMS_AT + (MOST_TILES - MOST_OWN) * TILE_BYTES)
#define RING_AT (SUMS_AT + MOST_TILES * TILE_BYTES)
#define BARS_AT (RING_AT + RING * SLOT_BYTES)

// The units of a block in the order in which they are added, and again for each pass.
struct Order {
    u32 chunk0, count, length, longer;  // of the first `longer` sums, `length` units; of the others, one less
    u32 sum, place;
    __device__ __forceinline__ explicit Order(const Product& p) {
        chunk0 = p.chunk0, count = min(p.k / 64, p.chunk1 * 8) - chunk0 * 8, length = p.chunk1 - chunk0;
        longer = count - (length - 1) * 8, sum = place = 0;
    }
    __device__ __forceinline__ u32 unit() const { return (chunk0 + place) * 8 + sum; }
    __device__ __forceinline__ void next() {
        if (++place < length - (sum >= longer)) return;
        place = 0;
        if (++sum == (length == 1 ? longer : 8)) sum = 0;
    }
};

// Fills the ring: each slot with as many units of a pass as fit. By a warp, a unit of a half tile a lane.
__device__ __forceinline__ void copy_weights(const Product& p, Ring& ring, u32 lane, u64 policy) {
    const u32 of_slot = MOST_TILES / p.tiles, row_bytes = p.k / SPAN * SPAN_BYTES;
    for (u32 first = 0; first < p.run; first += p.tiles) {
        const u32 tiles = min(p.tiles, p.run - first), of_lane = lane / tiles;
        Order order(p);  // of the lane's units
        for (u32 i = 0; i < of_lane; i++) order.next();
        for (u32 at = 0; at < order.count; at += of_slot, ring.next()) {
            phase_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1);
            const u32 cells = min(of_slot, order.count - at) * tiles, bar = ring.full + 8 * ring.slot;
            if (lane == 0) phase_arrive_expecting(bar, cells * CELL_BYTES);
            __syncwarp();
            if (lane < cells) {
                const u32 unit = order.unit(), tile = p.tile0 + first + lane % tiles;
                const u8* from = p.w[0];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (tile >= p.first[i]) from = p.w[i] + (u64)(tile - p.first[i]) * row_bytes;
                from += unit / UNITS_OF_SPAN * HEADERS * SPAN_BYTES;
                const u32 to = ring.base + ring.slot * SLOT_BYTES + (of_lane * p.tiles + lane % tiles) * CELL_BYTES;
                if constexpr (SPAN > 64) {
                    bulk_copy_once(to, from, HEADER_BYTES, bar, policy);
                    bulk_copy_once(to + HEADER_BYTES, from + HEADER_BYTES + unit % UNITS_OF_SPAN * UNIT_BYTES, UNIT_BYTES, bar, policy);
                } else bulk_copy_once(to, from, CELL_BYTES, bar, policy);
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

// Brings every BRINGERS-th panel. By a warp.
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
            const u32 to = panels.base + fetched_slot * PANEL_BYTES + panel_at(row0, piece);
#pragma unroll
            for (u32 i = 0; i < WIDE / 4; i++, from += 4 * p.x_stride)  // rows 4 further on: the pieces of half of them change places
                if (row0 + 4 * i < p.rows) copy16(i % 2 ? (to + i * 512) ^ 64 : to + i * 512, from, 16);
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
        const u32 panel = panels.base + slot * PANEL_BYTES;
        copies_wait<PANELS_AHEAD - 1>();
#pragma unroll
        for (u32 r = 0; r < WIDE / 32; r++) {
            // A lane scales what it copied. Rows that are not there are zeros.
            u32 v[8][4], to = panel + lane_at + r * 4096;
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3])
                             : "r"(i % 2 ? (to + i * 512) ^ 64 : to + i * 512));
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const bool there = r * 32 + i * 4 + row0 < p.rows;
#pragma unroll
                for (int e = 0; e < 4; e++) v[i][e] = there ? mul_bf16x2(v[i][e], by) : 0;
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(i % 2 ? (to + i * 512) ^ 64 : to + i * 512), "r"(v[i][0]), "r"(v[i][1]),
                             "r"(v[i][2]), "r"(v[i][3])
                             : "memory");
            }
        }
        fence_shared_async();
        __syncwarp();
        u32 a[4];
        ones(a);
#pragma unroll
        for (u32 r = 0; r < WIDE / 8; r += 4) {
            u32 b[4][4][2];
            float total[4][SUBS][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) load_matrices(b[i][2 * h], b[i][2 * h + 1], panel + (r + i) * 1024 + panel_at(lane % 8, h * 4 + lane / 8));
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) mma(total[i][j * SUBS / 4], a, b[i][j][0], b[i][j][1]);
            const u32 to = panels.base + TOTALS_AT + (slot * SUBS * WIDE + r * 8 + 2 * lane) * 4;
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int s = 0; s < SUBS; s++)
                    if (lane < 4)
                        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (s * WIDE + i * 8) * 4), "f"(total[i][s][0]), "f"(total[i][s][1]) : "memory");
        }
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

// The sums of a pass of `tiles` half tiles, into shared memory; MINE of a warp.
template <int MINE>
__device__ __forceinline__ void sums_of_pass(const Product& p, Order order, u32 tiles, Block& block) {
    constexpr int STEPS = MINE * SUBS, OF_STEP = 4 / SUBS;
    const u32 warp = block.warp, lane = block.lane, t = lane % 4, of_slot = MOST_TILES / p.tiles;
    float sum[MINE][WIDE / 2], raw[WIDE / 2];
    u32 operand[2][OF_STEP][4];
    Unit unit[2] = {};
#pragma unroll
    for (int m = 0; m < MINE; m++)
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) sum[m][i] = 0.f;

    // Takes the codes of a step, one step before the tensor cores do. Step: a part with one scale of a unit of half tile warp + 8 m.
    Ring& ring = block.ring;
    u32 in_slot = 0, taken = 0;
    const u8 *const cells = block.shared + RING_AT + warp * CELL_BYTES + lane * 16, *cell = cells + ring.slot * SLOT_BYTES;
    auto take = [&](Unit& w, u32(&to)[OF_STEP][4], int m, int s) {
        if (m == 0 && s == 0 && in_slot == 0) phase_wait(ring.full + 8 * ring.slot, ring.parity);
        const u8* at = cell + 8 * m * CELL_BYTES - lane * 16;
        if (s == 0 && warp + 8 * m < tiles) load_unit(w, at, at + HEADER_BYTES, SPAN > 64 ? order.unit() % UNITS_OF_SPAN : 0, lane);
#pragma unroll
        for (int j = 0; j < OF_STEP; j++) codes_of_step(to[j], w, s * OF_STEP + j);
        keep(to);  // now, not when they are needed
        if (m + 1 < MINE || s + 1 < SUBS) return;
        taken++, order.next(), cell += p.tiles * CELL_BYTES;
        if (++in_slot == of_slot || taken == order.count) {
            __syncwarp();
            if (lane == 0) phase_arrive(ring.empty + 8 * ring.slot);
            ring.next(), in_slot = 0, cell = cells + ring.slot * SLOT_BYTES;
        }
    };
    take(unit[0], operand[0], 0, 0);
    u32 panel = block.panels.slot(0), parity = block.panels.parity(0), which = 0, left = order.length;  // units of sum `which`
    const u64 panel0 = rows_along(block.panels.base);
    u64 operand_at = panel0 + panel * (PANEL_BYTES / 16);
    const float2 *const totals0 = (const float2*)(block.shared + TOTALS_AT) + t, *totals = totals0 + panel * (SUBS * WIDE / 2);
    for (u32 at = 0; at < order.count; at += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {  // in turns: registers have no index
            if (at + half >= order.count) break;
            phase_wait(block.panels.full + 8 * panel, parity);
#pragma unroll
            for (int q = 0; q < STEPS; q++) {
                const int m = q / SUBS, s = q % SUBS, now = (half * STEPS + q) % 2, w = (half * MINE + m) % 2, next = (q + 1) % STEPS;
                keep(operand[now]), keep(raw);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < OF_STEP; j++) wgmma(raw, operand[now][j], operand_at + 2 * (s * OF_STEP + j), j > 0);  // 32 bytes a step
                wgmma_commit();
                float2 total[WIDE / 8];
#pragma unroll
                for (int r = 0; r < WIDE / 8; r++) total[r] = totals[s * WIDE / 2 + 4 * r];
                if (next || at + half + 1 < order.count) take(unit[s + 1 < SUBS ? w : w ^ 1], operand[now ^ 1], next / SUBS, next % SUBS);
                float scale[2], bias[2];
                scales(unit[w], s, scale, bias);
                wgmma_wait<0>();
                keep(operand[now]), keep(raw);
#pragma unroll
                for (int i = 0; i < WIDE / 2; i++) {
                    const float of_bias = i % 2 ? total[i / 4].y : total[i / 4].x;
                    sum[m][i] = fmaf(scale[i / 2 % 2], raw[i], fmaf(bias[i / 2 % 2], of_bias, sum[m][i]));
                }
            }
            __syncwarp();
            if (lane == 0) phase_arrive(block.panels.empty + 8 * panel);
            panel++, operand_at += PANEL_BYTES / 16, totals += SUBS * WIDE / 2;
            if (panel == PANELS) panel = 0, parity ^= 1, operand_at = panel0, totals = totals0;
            if (--left == 0) {
#pragma unroll
                for (int m = 0; m < MINE; m++)
                    if (warp + 8 * m < tiles) {
                        float* done = (float*)(block.shared + SUMS_AT + (warp + 8 * m) * TILE_BYTES) + lane;
#pragma unroll
                        for (int c = 0; c < WIDE / 2; c += 8) {  // loads first: each takes long
                            float before[8];
                            if (which)
#pragma unroll
                                for (int i = 0; i < 8; i++) before[i] = done[32 * (c + i)];
#pragma unroll
                            for (int i = 0; i < 8; i++) done[32 * (c + i)] = which ? before[i] + sum[m][c + i] : sum[m][c + i];
                        }
                    }
#pragma unroll
                for (int m = 0; m < MINE; m++)
#pragma unroll
                    for (int i = 0; i < WIDE / 2; i++) sum[m][i] = 0.f;
                left = ++which < order.longer ? order.length : order.length - 1;
            }
        }
}

__device__ __forceinline__ void wide_product(const Product& p, const u64* word, Block& block) {
    const Order order(p);
    const u32 lane = block.lane, g = lane / 4, t = lane % 4, rank = blockIdx.x % 2;
    for (u32 first = 0; first < p.run; first += p.tiles) {
        const u32 tiles = min(p.tiles, p.run - first), fours = (tiles + 3) / 4, group = block.warp / 4;
        const u32 mine = fours > group ? (fours - group + 1) / 2 : 0;  // of the warpgroup
        if (mine == 3) sums_of_pass<3>(p, order, tiles, block);
        else if (mine == 2) sums_of_pass<2>(p, order, tiles, block);
        else if (mine == 1) sums_of_pass<1>(p, order, tiles, block);
        else {
            Ring& ring = block.ring;
            for (u32 at = 0; at < order.count; at++) {
                const u32 slot = block.panels.slot(at);
                phase_wait(block.panels.full + 8 * slot, block.panels.parity(at));
                __syncwarp();
                if (lane == 0) phase_arrive(block.panels.empty + 8 * slot);
                if (at % (MOST_TILES / p.tiles)) continue;
                phase_wait(ring.full + 8 * ring.slot, ring.parity);
                __syncwarp();
                if (lane == 0) phase_arrive(ring.empty + 8 * ring.slot);
                ring.next();
            }
        }
        block.panels.passed += order.count;

        // A warp stores the half tiles whose sums it has.
        auto sums_at = [&](u32 at, u32 tile) { return (float*)(block.shared + at + tile * TILE_BYTES) + lane; };
        if (p.split > 1) {
            for (u32 tile = block.warp; tile < tiles; tile += 8) {
                if (tile % 2 == rank) continue;
                const float* from = sums_at(SUMS_AT, tile);
                const u32 to = in_block(shared_address(sums_at(CROSS_AT, tile / 2)), rank ^ 1);
                for (int i = 0; i < WIDE / 2; i++) asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + 128 * i), "f"(from[32 * i]) : "memory");
            }
            __syncwarp();
            if (lane == 0)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(block.cross, rank ^ 1)) : "memory");
            phase_wait_cluster(block.cross, block.cross_parity);
            block.cross_parity ^= 1;
        }
        for (u32 tile = block.warp; tile < tiles; tile += 8) {
            if (p.split > 1 && tile % 2 != rank) continue;
            const float *sums = sums_at(SUMS_AT, tile), *others = sums_at(CROSS_AT, tile / 2);
            u32 part = 0, before = 0;
#pragma unroll
            for (int i = 1; i < 4; i++)
                if (p.tile0 + first + tile >= p.first[i]) part = i, before = p.first[i];
            const u32 o = (p.tile0 + first + tile - before) * 16 + g, n = word[9 + 3 * part];
            float* out = (float*)word[8 + 3 * part];
            const bool old = (u32)word[4] >> part & 1;
#pragma unroll 8
            for (int i = 0; i < WIDE / 2; i++) {
                const u32 row = i / 4 * 8 + 2 * t + i % 2, output = o + i / 2 % 2 * 8;
                if (row >= p.rows || output >= n) continue;
                float v = sums[32 * i];
                if (p.split > 1) v = rank ? others[32 * i] + v : v + others[32 * i];
                float* to = out + (u64)row * n + output;
                *to = fmaf(v, UNSCALE, old ? *to : 0.f);
            }
        }
    }
}
