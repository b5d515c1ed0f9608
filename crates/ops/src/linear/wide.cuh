// The product of many rows as a stage of a chain: out[rows, n] (+)= x[rows, k] W[n, k]^T, weights read once.
// shapes   x in panels of up to WIDE rows, see panels.cuh; W in the order of fragments.rs; out f32; k a multiple of 64 and of the span
// traffic  the weights once; x once for each pass of MOST_TILES half tiles and block, from L2
// source   definition: mod.rs reference(), with weights rounded to bf16; docs/decisions/few-row-matmul-on-hopper.md has what else was tried
//
// Each row has the bits that product.cuh gives it: there, a warp has the sum of every eighth 64 inputs, and those of the eight warps are
// added in order. Here, warpgroups take these sums one after the other and add each to what lies in shared memory; both kinds of matrix
// instruction round alike. A unit is 64 inputs of a half tile.
//
// Work. A warpgroup multiplies four half tiles at a time, one a warp, and has at most two such rows. Up to FEW_TILES half tiles are
// all each warpgroup's, and the three warpgroups have a sum each, abreast; more are dealt to them, and all have the same sum.
//
// Stream. Three warps copy weights, in turns: one warp takes too long to start so small copies. They run ahead into the next product.
// One warp copies panels.
//
// Defines: those of weight.cuh; BLOCKS of eight rows, 2, 4 or 8: WIDE rows; RING; MIXING: bytes that mixers may have.

#define FEW_TILES 8
#define MOST_TILES (WIDE == 64 ? 18 : 24)
#define CELL_BYTES (SPAN > 64 ? HEADER_BYTES + UNIT_BYTES : HEADERS * SPAN_BYTES)  // a unit of a half tile
#define SLOT_BYTES (CELLS * CELL_BYTES)
#define PANELS (WIDE == 64 ? 3 : 4)  // of GROUPS sums abreast
#define TILE_BYTES (WIDE * 64)  // sums of a half tile
#define MOST_OWN 3  // half tiles that a block stores of a run whose k is split
#define WEIGHT_COPIERS (RING < COPIERS - 1 ? RING : COPIERS - 1)  // no more than slots: see product.cuh
#define GROUPS (COMPUTERS / 4)
#define CELLS (FEW_TILES * GROUPS)  // of a slot

// Shared memory, in this order, from a multiple of 1024 on. Up to the ring it is free between products, and then mixers have it.
#define SUMS_AT (PANELS * GROUPS * PANEL_BYTES)
#define CROSS_AT (SUMS_AT + (MOST_TILES - MOST_OWN) * TILE_BYTES)
#define SUMS_END (SUMS_AT + MOST_TILES * TILE_BYTES)
#define RING_AT (SUMS_END > MIXING ? SUMS_END : MIXING)
#define BARS_AT (RING_AT + RING * SLOT_BYTES)

// The order in which a pass goes through a block's units: those of `abreast` sums at a time, chunk after chunk.
struct Order {
    u32 chunk0, length, units, abreast;  // length: chunks, of which the last may have less than eight units
    u32 sum, place;                      // sum: the first of those that are abreast
    __device__ __forceinline__ explicit Order(const Product& p) {
        chunk0 = p.chunk0, length = p.chunk1 - chunk0, units = min(p.k / 64, p.chunk1 * 8), abreast = p.tiles > FEW_TILES ? 1 : GROUPS;
        sum = place = 0;
    }
    __device__ __forceinline__ u32 unit() const { return (chunk0 + place) * 8 + sum; }
    // Units abreast here.
    __device__ __forceinline__ u32 count() const { return min(min(abreast, 8 - sum), units - unit()); }
    // Places of the sums that begin with this one.
    __device__ __forceinline__ u32 places(u32 sum) const { return length - ((chunk0 + length - 1) * 8 + sum >= units); }
    __device__ __forceinline__ u32 all() const {
        u32 n = 0;
        for (u32 first = 0; first < 8; first += abreast) n += places(first);
        return n;
    }
    __device__ __forceinline__ void next() {
        if (++place == length || unit() >= units) place = 0, sum += abreast;
        if (sum >= 8 || unit() >= units) sum = 0;
    }
};

// Fills every WEIGHT_COPIERS-th slot of the ring. By a warp, a half tile a lane.
struct WeightCopier {
    Ring ring;
    u32 turn;  // slots until this warp's next
    u64 policy;

    __device__ __forceinline__ void fill(const Product& p, u32 lane) {
        for (u32 first = 0; first < p.run; first += p.tiles) {
            const u32 tiles = min(p.tiles, p.run - first), tile = p.tile0 + first + min(lane, tiles - 1);
            const u8* row = p.half_tile(tile);
            Order order(p);
            const u32 to = ring.base + lane * CELL_BYTES * order.abreast;
            for (u32 left = order.all(); left > 0; left--, order.next(), ring.next()) {
                if (turn--) continue;
                turn = WEIGHT_COPIERS - 1;
                phase_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1);
                const u32 bar = ring.full + 8 * ring.slot, count = order.count(), slot = to + ring.slot * SLOT_BYTES;
                if (lane == 0) phase_arrive_expecting(bar, tiles * count * CELL_BYTES);
                __syncwarp();
                if (lane < tiles) {
                    if constexpr (SPAN > 64) {
                        for (u32 i = 0; i < count; i++) {
                            const u32 unit = order.unit() + i;
                            const u8* from = row + unit / UNITS_OF_SPAN * SPAN_BYTES;
                            bulk_copy_once(slot + i * CELL_BYTES, from, HEADER_BYTES, bar, policy);
                            bulk_copy_once(slot + i * CELL_BYTES + HEADER_BYTES, from + HEADER_BYTES + unit % UNITS_OF_SPAN * UNIT_BYTES, UNIT_BYTES, bar, policy);
                        }
                    } else bulk_copy_once(slot, row + order.unit() * CELL_BYTES, count * CELL_BYTES, bar, policy);
                }
                __syncwarp();
            }
        }
    }
};

// Slots of as many panels as sums are abreast. Each product begins with the first.
struct Panels {
    u32 base, full, empty, slots, slot, parities;  // a bit each
    __device__ __forceinline__ void begin(u32 abreast) { slots = GROUPS * PANELS / abreast, slot = 0; }
    __device__ __forceinline__ u32 parity() const { return parities >> slot & 1; }
    __device__ __forceinline__ void next() {
        parities ^= 1 << slot;
        if (++slot == slots) slot = 0;
    }
};

// Copies panels. By one thread.
__device__ __forceinline__ void copy_panels(const Product& p, Panels& panels) {
    Order order(p);
    panels.begin(order.abreast);
    for (u32 left = (p.run + p.tiles - 1) / p.tiles * order.all(); left > 0; left--, order.next(), panels.next()) {
        phase_wait(panels.empty + 8 * panels.slot, panels.parity() ^ 1);
        const u32 bar = panels.full + 8 * panels.slot, count = order.count(), unit = order.unit(), place = panels.slot * order.abreast;
        phase_arrive_expecting(bar, count * PANEL_BYTES);
        bulk_copy(panels.base + place * PANEL_BYTES, p.x + unit * PANEL_BYTES, count * PANEL_BYTES, bar);
    }
}

// Where things are in shared memory.
struct Stream {
    u8* shared;  // from a multiple of 1024 on
    Ring ring;
    Panels panels;
    u32 cross;
};
__device__ __forceinline__ Stream begin_stream(u8* shared) {
    u8* base = shared + (1024 - shared_address(shared) % 1024) % 1024;
    const u32 at = shared_address(base), full = at + BARS_AT, empty = full + 8 * RING, cross = empty + 8 * RING;
    const Panels panels = {at, cross + 8, cross + 8 + 8 * GROUPS * PANELS, 0, 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) phase_init(full + 8 * i, 1), phase_init(empty + 8 * i, COMPUTERS);
        phase_init(cross, COMPUTERS);
        for (int i = 0; i < GROUPS * PANELS; i++) phase_init(panels.full + 8 * i, 1), phase_init(panels.empty + 8 * i, COMPUTERS);
    }
    return {base, {at + RING_AT, full, empty, 0, 0}, panels, cross};
}

#define PANELS_READY 2  // a barrier, of computing warps and the one that copies panels
__device__ __forceinline__ void copy_stream(const Stream& stream, const Program& program, u32 copier, u32 lane) {
    give_registers<56>();
    if (copier < WEIGHT_COPIERS) {
        WeightCopier copies = {stream.ring, copier, read_once()};
        for (u32 i = 0; i < program.count; i++)
            if (program.kind[i] == 0) copies.fill(Product(program.word[i]), lane);
    } else if (copier == COPIERS - 1) {
        Panels panels = stream.panels;
        wait();
        for (u32 i = 0; i < program.count; i++) {
            if (program.kind[i] != 0) continue;
            const Product p(program.word[i]);
            if (p.run == 0) continue;
            barrier(PANELS_READY, 32 * (COMPUTERS + 1));
            asm volatile("fence.proxy.async.global;" ::: "memory");
            if (lane == 0) copy_panels(p, panels);
            __syncwarp();
        }
    }
}

// What a block's computing warps keep from stage to stage.
struct Block {
    u8* shared;
    Ring ring;
    Panels panels;
    u32 warp, lane, cross, cross_parity;
};
__device__ __forceinline__ Block begin_block(const Stream& stream, u32 warp, u32 lane) {
    take_registers<152>();
    return {stream.shared, stream.ring, stream.panels, warp, lane, stream.cross, 0};
}

// Warpgroups that have sums of the same half tiles add them in turns.
#define TURNS_AT 5  // barriers
__device__ __forceinline__ void turn_begins(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(TURNS_AT + group) : "memory"); }
__device__ __forceinline__ void turn_ends(u32 group) { asm volatile("bar.arrive %0, 256;" ::"r"(TURNS_AT + (group + 1) % GROUPS) : "memory"); }

// The sums of a pass of `tiles` half tiles, into shared memory. Of MINE half tiles of this warp, if there are so many.
template <int MINE>
__device__ __forceinline__ void sums_of_pass(const Product& p, u32 tiles, Block& block) {
    const Order order(p);
    const bool several = order.abreast > 1;
    const u32 group = block.warp / 4, my_sum = several ? group : 0;
    const u32 mine0 = several ? block.warp % 4 : block.warp, apart = several ? 4 : COMPUTERS;  // my half tiles
    float sum[MINE][WIDE / 2];
    u32 weights[2][4][4];  // of this unit and of the next
    Unit unit;

    // Where this warp is. In registers of its own: made anew from where the block is, each would be a chain of slow instructions.
    u32 lane = block.lane, left = order.all();
    u32 cells_at = shared_address(block.shared) + RING_AT + (mine0 * order.abreast + my_sum) * CELL_BYTES, cell_at = cells_at + block.ring.slot * SLOT_BYTES;
    const u32 second_at = apart * order.abreast * CELL_BYTES;
    const u64 operand = rows_along(0) >> 32 << 32;  // its low word is where it lies, which is all that changes
    u32 panel = (u32)rows_along(block.panels.base + (block.panels.slot * order.abreast + my_sum) * PANEL_BYTES);
    asm volatile("" : "+r"(lane), "+r"(cells_at), "+r"(cell_at));

    auto enter = [&]() {
        if (left == 0) return;
        phase_wait(block.ring.full + 8 * block.ring.slot, block.ring.parity);
        phase_wait(block.panels.full + 8 * block.panels.slot, block.panels.parity());
    };
    auto go_on = [&]() {
        left--, block.ring.next(), block.panels.next();
        cell_at = block.ring.slot == 0 ? cells_at : cell_at + SLOT_BYTES;
        if (block.panels.slot == 0) panel -= (block.panels.slots - 1) * order.abreast * (PANEL_BYTES / 16);
        else panel += order.abreast * (PANEL_BYTES / 16);
    };
    auto leave = [&](u32 slot, u32 panels) {
        __syncwarp();
        if (lane == 0) phase_arrive(block.ring.empty + 8 * slot), phase_arrive(block.panels.empty + 8 * panels);
    };
    // A half tile's codes come into registers, then they are made weights.
    auto fetch = [&](int m, u32 first_sum) {
        const u8* at = (const u8*)__cvta_shared_to_generic(cell_at + m * second_at);
        load_unit(unit, at, at + HEADER_BYTES, SPAN > 64 ? (first_sum + my_sum) % UNITS_OF_SPAN : 0, lane);
    };
    auto decode = [&](u32(&to)[4][4]) {
        weights_of_unit(to, unit);
        keep(to);  // now, not when they are needed
    };
    auto start = [&](int m, u32(&a)[4][4]) {
        keep(a);
        if (m == 0)
#pragma unroll
            for (int i = 0; i < MINE; i++) keep(sum[i]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) wgmma(sum[m], a[j], operand | (panel + 2 * j), 1);  // 32 bytes a step
        wgmma_commit();
    };
    // The units of one place, whose first has its weights in `here`, and which leaves those of the next place in `after`.
    auto multiply = [&](u32(&here)[4][4], u32(&after)[4][4], u32 first_sum, u32 next_sum) {
        const u32 slot = block.ring.slot, panels = block.panels.slot;
        start(0, here);
        if (MINE == 2) {
            if (mine0 + apart < tiles) fetch(1, first_sum), decode(after);  // else sums that nobody reads
            start(1, after);
            wgmma_wait<1>();
            keep(here), keep(sum[0]);
            go_on(), enter();
            fetch(0, next_sum), decode(here);
            wgmma_wait<0>();
            keep(after), keep(sum[1]);
        } else {
            go_on(), enter();
            fetch(0, next_sum), decode(after);
            wgmma_wait<0>();
            keep(here), keep(sum[0]);
        }
        leave(slot, panels);
    };

    enter();
    fetch(0, 0), decode(weights[0]);
    bool odd = false;  // whether the next unit's weights are in weights[1]
#pragma unroll 1
    for (u32 first_sum = 0; first_sum < 8; first_sum += order.abreast) {
#pragma unroll
        for (int m = 0; m < MINE; m++)
#pragma unroll
            for (int i = 0; i < WIDE / 2; i++) sum[m][i] = 0.f;
        const u32 places = order.places(first_sum), my_places = first_sum + my_sum < 8 ? order.places(first_sum + my_sum) : 0;
#pragma unroll 1
        for (u32 place = 0; place < my_places; place++) {
            const u32 next_sum = place + 1 < places ? first_sum : first_sum + order.abreast;
            if (MINE == 2 || !odd) multiply(weights[0], weights[1], first_sum, next_sum);
            else multiply(weights[1], weights[0], first_sum, next_sum);
            odd ^= MINE == 1;
        }
        // Places where others have a unit.
#pragma unroll 1
        for (u32 place = my_places; place < places; place++) {
            const u32 slot = block.ring.slot, panels = block.panels.slot;
            go_on(), enter();
            if (place + 1 == places) {
                fetch(0, first_sum + order.abreast);
                if (odd) decode(weights[1]);
                else decode(weights[0]);
            }
            leave(slot, panels);
        }
        if (several && first_sum + group > 0) turn_begins(group);
#pragma unroll
        for (int m = 0; m < MINE; m++)
            if (mine0 + apart * m < tiles && first_sum + my_sum < 8) {
                float* done = (float*)(block.shared + SUMS_AT + (mine0 + apart * m) * TILE_BYTES) + lane;
#pragma unroll
                for (int c = 0; c < WIDE / 2; c += 8) {  // loads first: each takes long
                    float before[8];
                    if (first_sum + my_sum)
#pragma unroll
                        for (int i = 0; i < 8; i++) before[i] = done[32 * (c + i)];
#pragma unroll
                    for (int i = 0; i < 8; i++) done[32 * (c + i)] = first_sum + my_sum ? before[i] + sum[m][c + i] : sum[m][c + i];
                }
            }
        if (several && (first_sum + GROUPS < 8 || group < GROUPS - 1)) turn_ends(group);
    }
}

__device__ __forceinline__ void product(const Product& p, const u64* word, Block& block) {
    if (p.run) asm volatile("bar.arrive %0, %1;" ::"n"(PANELS_READY), "n"(32 * (COMPUTERS + 1)) : "memory");
    const u32 lane = block.lane, g = lane / 4, t = lane % 4, rank = blockIdx.x % 2;
    block.panels.begin(Order(p).abreast);
    for (u32 first = 0; first < p.run; first += p.tiles) {
        const u32 tiles = min(p.tiles, p.run - first);
        const u32 all = p.tiles > FEW_TILES ? (tiles + COMPUTERS - 1 - block.warp / 4 * 4) / COMPUTERS : (tiles + 3) / 4;
        if (all > 1) sums_of_pass<2>(p, tiles, block);
        else sums_of_pass<1>(p, tiles, block);
        barrier(3, 32 * COMPUTERS);

        // By pieces of 16 rows of a half tile, a warp each: 8 sums of a lane.
        const u32 pieces = tiles * (WIDE / 16);
        auto sums_at = [&](u32 at, u32 piece) { return (float*)(block.shared + at) + piece * 256 + lane; };
        auto others = [&](u32 tile) { return CROSS_AT + tile / 2 * TILE_BYTES - tile * TILE_BYTES; };  // what the other block has of them
        if (p.split > 1) {
            for (u32 piece = block.warp; piece < pieces; piece += COMPUTERS) {
                const u32 tile = piece / (WIDE / 16);
                if (tile % 2 == rank) continue;
                const float* from = sums_at(SUMS_AT, piece);
                const u32 to = in_block(shared_address(sums_at(others(tile), piece)), rank ^ 1);
#pragma unroll
                for (int i = 0; i < 8; i++) asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + 128 * i), "f"(from[32 * i]) : "memory");
            }
            __syncwarp();
            if (lane == 0)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(block.cross, rank ^ 1)) : "memory");
            phase_wait_cluster(block.cross, block.cross_parity);
            block.cross_parity ^= 1;
        }
        for (u32 piece = block.warp; piece < pieces; piece += COMPUTERS) {
            const u32 tile = piece / (WIDE / 16), row0 = piece % (WIDE / 16) * 16;
            if (p.split > 1 && tile % 2 != rank) continue;
            const float *sums = sums_at(SUMS_AT, piece), *other = sums_at(others(tile), piece);
            u32 part = 0, before = 0;
#pragma unroll
            for (int i = 1; i < 4; i++)
                if (p.tile0 + first + tile >= p.first[i]) part = i, before = p.first[i];
            const u32 o = (p.tile0 + first + tile - before) * 16 + g, n = word[9 + 3 * part];
            float* out = (float*)word[8 + 3 * part] + o;
            const bool old = (u32)word[4] >> part & 1;
            float v[8], is[8];
            auto there = [&](int e) { return row0 + e / 4 * 8 + 2 * t + e % 2 < p.rows && o + e / 2 % 2 * 8 < n; };
            auto place = [&](int e) { return (u64)(row0 + e / 4 * 8 + 2 * t + e % 2) * n + e / 2 % 2 * 8; };
#pragma unroll
            for (int e = 0; e < 8; e++) {
                is[e] = old && there(e) ? out[place(e)] : 0.f, v[e] = sums[32 * e];
                if (p.split > 1) v[e] = rank ? other[32 * e] + v[e] : v[e] + other[32 * e];
            }
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (there(e)) out[place(e)] = fmaf(v[e], WEIGHTS_UNSCALE, is[e]);
        }
        if (first + p.tiles < p.run) barrier(3, 32 * COMPUTERS);  // all sums were read
    }
}
