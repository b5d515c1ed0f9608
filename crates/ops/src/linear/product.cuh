// The product of few rows as a stage of a chain: out[rows, n] (+)= x[rows, k] W[n, k]^T, weights read once at the speed of memory.
// shapes   x bf16 rows; W in the order of fragments.rs; out f32; 8 BLOCKS rows; k a multiple of 64 and of the span
// traffic  the weights once; x once for each pass of TILES half tiles and block, from L2
// source   definition: mod.rs reference(), with weights rounded to bf16; docs/decisions/few-row-matmul-on-hopper.md has what else was tried
//
// Work. The half tiles (16 outputs) of all parts are dealt to clusters in nearly equal runs; where there are few, the two blocks of
// a cluster take a half of k each. A block goes through its run in passes of TILES half tiles, and through k in chunks of 512
// inputs, of which each of its 8 warps takes 64. So a warp needs 64 inputs of each row at a time and keeps the sums of all half
// tiles of a pass. At the end of a pass the 8 warps' sums are added in order, then those of the cluster's blocks: an order
// fixed by n, k and the card. A row's bits are the same alone and among others.
//
// Stream. COPIERS warps keep a ring of RING slots full, in turns, up to SLOT_TILES half tiles of a chunk in each: one warp takes
// too long to start the copies. Weights depend on nothing, so the ring runs on into the next product while the block waits
// for its inputs.
//
// Defines: those of weight.cuh; BLOCKS; RING.

#define CHUNK_BYTES (CHUNK / SPAN * SPAN_BYTES)
#define SLOT_TILES (BLOCKS > 1 ? 1 : CODES == 1 ? 2 : 3)  // as many as registers hold
#define SLOT_BYTES (SLOT_TILES * CHUNK_BYTES)
#define MOST_ROUND (8 / BLOCKS)    // half tiles that are summed up at a time
#define X_BYTES (BLOCKS * 8 * 128)  // a warp's 64 inputs of every row
#define X_AHEAD 3                   // chunks whose activations a warp holds
#define MOST_OWN 3                  // half tiles that a block stores of a run whose k is split

// Shared memory, in this order.
#define X_AT (RING * SLOT_BYTES)
#define SUMS_AT (X_AT + WARPS * X_AHEAD * X_BYTES)
#define CROSS_AT (SUMS_AT + WARPS * MOST_ROUND * BLOCKS * 512)
#define BARS_AT (CROSS_AT + 2 * MOST_OWN * BLOCKS * 512)

// Slots for one chunk of `tiles` half tiles.
__host__ __device__ constexpr int slots_of(int tiles) { return ceil_div(tiles, SLOT_TILES); }

// Warps that fill slots, in turns. No more than slots: one warp must not come to a slot's next turn but one before another has
// seen the turn between.
#define TURNS (RING < COPIERS ? RING : COPIERS)

// Fills every TURNS-th slot of the stream. By a whole warp, a half tile a lane.
struct Copier {
    Ring ring;
    u32 turn;  // slots until this warp's next
    u64 policy;

    __device__ __forceinline__ void fill(const Product& p, u32 lane) {
        const u32 slots = slots_of(p.tiles), most = ceil_div(p.tiles, slots);
        for (u32 first = 0; first < p.run; first += p.tiles)
            for (u32 c = p.chunk0; c < p.chunk1; c++)
                for (u32 i = 0, s = 0; i < slots; i++, s += most, ring.next()) {
                    if (turn--) continue;
                    turn = TURNS - 1;
                    phase_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1);
                    const u32 end = min(p.tiles, p.run - first), count = s < end ? min(most, end - s) : 0, bar = ring.full + 8 * ring.slot;
                    const u32 bytes = min((u32)CHUNK, p.k - c * CHUNK) / SPAN * SPAN_BYTES, tile = p.tile0 + first + s + lane;
                    if (lane == 0) phase_arrive_expecting(bar, count * bytes);
                    __syncwarp();
                    if (lane < count) {
                        bulk_copy_once(ring.base + ring.slot * SLOT_BYTES + lane * CHUNK_BYTES, p.half_tile(tile) + (u64)c * CHUNK_BYTES, bytes, bar, policy);
                    }
                    __syncwarp();
                }
    }
};

// Two outputs of a lane: rows r and r + 1.
struct Target {
    float* at;  // null if there is nothing to store
    u32 next;   // to the second one; 0 if there is none
    float2 old;
};
__device__ __forceinline__ void store(const Target& to, float2 v) {
    if (to.at) to.at[0] = fmaf(v.x, WEIGHTS_UNSCALE, to.old.x);
    if (to.at && to.next) to.at[to.next] = fmaf(v.y, WEIGHTS_UNSCALE, to.old.y);
}

// sum += weights x, for COUNT half tiles and 64 inputs. Several half tiles side by side, for the matrix instructions of one depend on
// each other.
template <int COUNT>
__device__ __forceinline__ void multiply(float (*sum)[BLOCKS][4], const Unit* w, const u32 (&b)[BLOCKS][4][2]) {
    u32 a[COUNT][4][4];
#pragma unroll
    for (int i = 0; i < COUNT; i++) weights_of_unit(a[i], w[i]);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int r = 0; r < BLOCKS; r++) mma(sum[i][r], a[i][j], b[r][j][0], b[r][j][1]);
}

// Where things are in shared memory.
struct Stream {
    u8* shared;
    Ring ring;
    u32 cross;
};
__device__ __forceinline__ Stream begin_stream(u8* shared) {
    const u32 full = shared_address(shared) + BARS_AT, empty = full + 8 * RING, cross = empty + 8 * RING;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) phase_init(full + 8 * i, 1), phase_init(empty + 8 * i, WARPS);
        phase_init(cross, WARPS);
    }
    return {shared, {shared_address(shared), full, empty, 0, 0}, cross};
}

__device__ __forceinline__ void copy_stream(const Stream& stream, const Program& program, u32 copier, u32 lane) {
    give_registers<56>();
    Copier copies = {stream.ring, copier, read_once()};
    for (u32 i = 0; i < program.count && copier < TURNS; i++)
        if (program.kind[i] == 0) copies.fill(Product(program.word[i]), lane);
}

// What a block's compute warps keep from stage to stage.
struct Block {
    u8* shared;
    Ring ring;
    u32 warp, lane, cross, cross_parity, dirty;  // dirty: rows of the activation buffers that are not zeros
};
__device__ __forceinline__ Block begin_block(const Stream& stream, u32 warp, u32 lane) {
    take_registers<216>();
    for (u32 i = lane * 4; i < X_AHEAD * X_BYTES; i += 128)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(stream.shared) + X_AT + warp * X_AHEAD * X_BYTES + i), "r"(0) : "memory");
    return {stream.shared, stream.ring, warp, lane, stream.cross, 0, 0};
}

template <int TILES, int SPLIT>
__device__ __forceinline__ void product(const Product& p, const u64* word, Block& block) {
    constexpr int SLOTS = slots_of(TILES), STAGE = ceil_div(TILES, SLOTS), ROUND = TILES < MOST_ROUND ? TILES : MOST_ROUND, ROUNDS = ceil_div(TILES, ROUND);
    constexpr int OWN = ceil_div(TILES, SPLIT);  // half tiles of a pass that a block of a cluster stores
    const u32 warp = block.warp, lane = block.lane, rank = SPLIT > 1 ? blockIdx.x % 2 : 0, g = lane / 4, t = lane % 4;
    const u32 shared_at = shared_address(block.shared), my_x = shared_at + X_AT + warp * X_AHEAD * X_BYTES;
    // Rows that are not there are zeros.
    for (u32 row = p.rows; row < block.dirty; row++)
#pragma unroll
        for (int b = 0; b < X_AHEAD; b++) asm volatile("st.shared.u32 [%0], %1;" ::"r"(my_x + b * X_BYTES + row * 128 + lane * 4), "r"(0) : "memory");
    block.dirty = p.rows;
    __syncwarp();

    // Copies this warp's inputs of the next chunk: 128 bytes of a row, whose pieces of 16 are permuted so that no two rows of eight meet
    // in a bank.
    const u32 steps = (p.run + TILES - 1) / TILES * (p.chunk1 - p.chunk0);
    u32 ahead = p.chunk0, fetched = 0;
    auto fetch_x = [&](u32 buffer) {
        const u32 k0 = ahead * CHUNK + warp * 64;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) {
            const u32 row = i * 4 + lane / 8, piece = lane % 8, to = my_x + buffer * X_BYTES + row * 128 + (piece ^ row % 8) * 16;
            if (fetched < steps && row < p.rows && k0 < p.k)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p.x + (u64)row * p.x_stride + k0 * 2 + piece * 16)
                             : "memory");
        }
        copies_commit();
        fetched++;
        if (++ahead == p.chunk1) ahead = p.chunk0;
    };
#pragma unroll
    for (int i = 0; i < X_AHEAD; i++) fetch_x(i);

    // Takes a slot's half tiles, s .. of a pass, into registers, one slot before they are multiplied. What is not there (half tiles, and
    // inputs of a last chunk that is short) is taken as it happens to be: nobody multiplies it, or reads its sums.
    Ring ring = block.ring;
    Unit w[2][STAGE];
    auto take = [&](Unit(&to)[STAGE], int s) {
        const u8* slot = block.shared + ring.slot * SLOT_BYTES;
        phase_wait(ring.full + 8 * ring.slot, ring.parity);
#pragma unroll
        for (int i = 0; i < STAGE; i++)
            if (s + i < TILES) load_unit(to[i], slot + i * CHUNK_BYTES, warp, lane);
        __syncwarp();
        if (lane == 0) phase_arrive(ring.empty + 8 * ring.slot);
        ring.next();
    };
    // B of this warp's 64 inputs of a chunk.
    u32 b[BLOCKS][4][2], buffer = 0;
    auto take_x = [&]() {
        copies_wait<X_AHEAD - 1>();
        __syncwarp();
#pragma unroll
        for (int r = 0; r < BLOCKS; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 row = lane % 8, at = my_x + buffer * X_BYTES + (r * 8 + row) * 128 + (h * 4 + lane / 8 ^ row) * 16;
                load_matrices(b[r][2 * h], b[r][2 * h + 1], at);
            }
        __syncwarp();
        fetch_x(buffer);
        if (++buffer == X_AHEAD) buffer = 0;
    };

    float sum[TILES][BLOCKS][4];
    // One chunk, whose first slot is in w[turn], a constant.
    auto multiply_chunk = [&](const int turn, u32 first, u32 c) {
        const u32 count = min((u32)TILES, p.run - first);
        const bool here = c * CHUNK + warp * 64 < p.k;  // false for some warps in a last chunk that is short
        take_x();
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            const int left = TILES - i * STAGE;
            Unit(&next)[STAGE] = w[(turn + i + 1) % 2];
            if (i + 1 < SLOTS) take(next, (i + 1) * STAGE);
            else if (c + 1 < p.chunk1 || first + TILES < p.run) take(next, 0);
            if (!here || i * STAGE >= count) continue;
            if (left >= STAGE) multiply<STAGE>(sum + i * STAGE, w[(turn + i) % 2], b);
            else if (left == 2) multiply<2>(sum + i * STAGE, w[(turn + i) % 2], b);
            else multiply<1>(sum + i * STAGE, w[(turn + i) % 2], b);
        }
    };
    if (p.run) take(w[0], 0);
    bool odd = false;
    for (u32 first = 0; first < p.run; first += TILES) {
        const u32 count = min((u32)TILES, p.run - first);
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int r = 0; r < BLOCKS; r++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][r][e] = 0.f;
#pragma unroll 1
        for (u32 c = p.chunk0; c < p.chunk1; c++) {
            if (odd) multiply_chunk(SLOTS % 2, first, c);
            else multiply_chunk(0, first, c);
            odd ^= SLOTS % 2;
        }

        // Adds the warps' sums. Item (i, r, h): half tile i of a round, 8 rows, outputs 8 h ..; a lane has two rows of it.
        constexpr int ROUND_ITEMS = ROUND * BLOCKS * 2, ALL_ITEMS = SPLIT > 1 ? OWN * BLOCKS * 2 : ROUND_ITEMS;
        constexpr int ITEMS = ceil_div(ALL_ITEMS, WARPS);  // of a warp
        float2* sums = (float2*)(block.shared + SUMS_AT);
        // Where an item of half tile i of the pass goes, and what is there if it is to be added to.
        auto target = [&](u32 i, u32 item) {
            const u32 row = item / 2 * 8 + 2 * t, tile = p.tile0 + first + i;
            // From the program again: in registers, all this would be in the way of the weights.
            u32 part = 0, before = 0;
#pragma unroll 1
            for (u32 past = 0; part < 4; part++, before = past) {
                past += ((u32)word[9 + 3 * part] + 15) / 16;
                if (tile < past || part == 3) break;
            }
            const u32 o = (tile - before) * 16 + item % 2 * 8 + g, n = word[9 + 3 * part];
            float* out = (float*)word[8 + 3 * part];
            const bool old = (u32)word[4] >> part & 1;
            Target to = {i < count && o < n && row < p.rows ? out + (u64)row * n + o : nullptr, row + 1 < p.rows ? n : 0, make_float2(0.f, 0.f)};
            if (old && to.at) to.old.x = to.at[0];
            if (old && to.at && to.next) to.old.y = to.at[to.next];
            return to;
        };
        Target targets[ITEMS];
        if (SPLIT > 1)  // a single pass
#pragma unroll
            for (int m = 0; m < ITEMS; m++) {
                const u32 at = warp + m * WARPS;
                targets[m] = target(at < ALL_ITEMS ? at / (BLOCKS * 2) * SPLIT + rank : count, at % (BLOCKS * 2));
            }
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            if (round * ROUND >= count) break;
            if (SPLIT == 1)
#pragma unroll
                for (int m = 0; m < ITEMS; m++) {
                    const u32 at = warp + m * WARPS;
                    targets[m] = target(at < ROUND_ITEMS ? round * ROUND + at / (BLOCKS * 2) : count, at % (BLOCKS * 2));
                }
            if (round || first) barrier(1, 32 * WARPS);  // the sums before were read
#pragma unroll
            for (int i = 0; i < ROUND && round * ROUND + i < TILES; i++)
#pragma unroll
                for (int r = 0; r < BLOCKS; r++) {
                    const float(&v)[4] = sum[round * ROUND + i][r];
                    float2* to = sums + ((warp * ROUND + i) * BLOCKS + r) * 64 + lane;
                    to[0] = make_float2(v[0], v[1]), to[32] = make_float2(v[2], v[3]);
                }
            barrier(1, 32 * WARPS);
#pragma unroll
            for (int m = 0; m < ceil_div(ROUND_ITEMS, WARPS); m++) {
                const u32 at = warp + m * WARPS, i = round * ROUND + at / (BLOCKS * 2);
                if (at >= ROUND_ITEMS || i >= count) break;
                float2 v = sums[at * 32 + lane];
#pragma unroll
                for (int w = 1; w < WARPS; w++) {
                    const float2 other = sums[(w * ROUND_ITEMS + at) * 32 + lane];
                    v.x += other.x, v.y += other.y;
                }
                if constexpr (SPLIT == 1) store(targets[m], v);
                else {
                    const u32 to = CROSS_AT + (((rank * OWN + i / SPLIT) * BLOCKS * 2 + at % (BLOCKS * 2)) * 32 + lane) * 8;
                    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(in_block(shared_at + to, i % SPLIT)), "f"(v.x), "f"(v.y)
                                 : "memory");
                }
            }
        }
        if constexpr (SPLIT > 1) {
            __syncwarp();
            if (lane == 0)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(block.cross, rank ^ 1)) : "memory");
            barrier(1, 32 * WARPS);
            phase_wait_cluster(block.cross, block.cross_parity);
            block.cross_parity ^= 1;
#pragma unroll
            for (int m = 0; m < ITEMS; m++) {
                const u32 at = warp + m * WARPS;
                if (at >= ALL_ITEMS) break;
                const float2* from = (const float2*)(block.shared + CROSS_AT) + at * 32 + lane;
                float2 v = from[0];
#pragma unroll
                for (int b = 1; b < SPLIT; b++) v.x += from[b * ALL_ITEMS * 32].x, v.y += from[b * ALL_ITEMS * 32].y;
                store(targets[m], v);
            }
        }
    }
    copies_wait<0>();
    block.ring = ring;
}

// The product, by the code for its number of half tiles: the defines T_2 and so on say which occur. More tiles than a
// block needs cost registers and time for nothing.
__device__ __forceinline__ void product(const Product& p, const u64* word, Block& block) {
#define CASE(TILES, SPLIT)                          \
    if (p.tiles == TILES && p.split == SPLIT) return product<TILES, SPLIT>(p, word, block);
#ifdef T_3_2
    CASE(3, 2)
#endif
#ifdef T_5_2
    CASE(5, 2)
#endif
#ifdef T_2
    CASE(2, 1)
#endif
#ifdef T_3
    CASE(3, 1)
#endif
#ifdef T_4
    CASE(4, 1)
#endif
#ifdef T_5
    CASE(5, 1)
#endif
#ifdef T_8
    CASE(8, 1)
#endif
#ifdef T_9
    CASE(9, 1)
#endif
}
