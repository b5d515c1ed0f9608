// Few-row quantised matmul: y[rows, N] = x[rows, K] * dequant(W)[N, K]^T, W in MLX affine 4 bit, group 64, 1 to 8 rows.
//
// CELL: 16 outputs x 64 inputs (one group deep) = 512 bytes of codes in the order of the mma.m16n8k16 A fragment + 64 bytes of
// (16*scale, bias) pairs: 576 bytes. The packed weight is [tile of 16 outputs][group] cells and nothing else: it depends on no tuning choice.
//
// Work. Tiles are dealt to blocks in nearly equal contiguous runs (to clusters of 2 blocks that halve K when tiles are few and K is long: ksplit 2).
// A block walks its range of K in `phases` of at most 80 groups; in a phase each warp has a contiguous class of groups. A warp loads the
// activation fragments of its class once and keeps them in registers, then streams tile after tile. Each tile's partial sums, one for each
// warp, meet in shared memory, where one warp (another for each tile) adds them in ascending order while the others go on. The order
// depends on N and K alone, never on the number of rows: a row's bits are the same alone and in a block.
//
// Stream. Each warp owns R slots of shared memory, refilled with one bulk copy as soon as they are consumed; the copies of a block's warps
// are adjacent in memory. Weights don't depend on the previous launch, so the ring fills before griddepcontrol.wait. Activations come by bulk copies too, one
// for each row: with most of shared memory taken, L1 is too small to keep that many plain loads in flight.
#pragma once
#include "ptx.cuh"

#ifdef TRACE
__device__ long long* g_trace;  // [op][block][2 warps][8]
#define STAMP(w, k) if ((w).lane == 0 && ((w).kw == 0 || (w).kw == KW - 1)) g_trace[(((size_t)(w).op * gridDim.x + blockIdx.x) * 2 + ((w).kw != 0)) * 8 + (k)] = clock64()
#else
#define STAMP(w, k)
#endif
constexpr int CELL = 576;
constexpr int MAX_PHASE = 80;               // groups of a phase
constexpr int XROW = MAX_PHASE * 128 + 64;  // bytes of a staged activation row; the 64 put neighbouring rows on different banks
constexpr int LAG = 3;                      // tiles that a partial sum waits before it is collected: by then the slowest warp has delivered

enum Epilogue { EPI_BF16 = 0, EPI_SWIGLU = 1, EPI_F32 = 2 };

struct Op {
    const uint8_t* w;    // packed weight
    const uint16_t* x;   // activations, bf16 [rows][ldx]
    void* y;             // bf16 or f32 [rows][ldy]
    int tiles, groups;   // N/16, K/64
    int ldx, ldy;
    unsigned run_fix;    // tiles per cluster, 8.24 fixed point, rounded up
    int sshift;          // log2 of ksplit
    int phases;          // per block
    int kind;            // groups of the longest class: the code path
    unsigned before;     // finished blocks of all earlier ops of a persistent chain: the grid barrier opens at this count
    int epi;
    float alpha, limit;  // output multiplier and SwiGLU clamp (harness: they keep a chain of random weights finite)
};

__host__ __device__ inline int run_start(const Op& op, int cid) { return (int)(((unsigned long long)(unsigned)cid * op.run_fix) >> 24); }
// Groups of phase q of all (q = rank * phases + phase of the block); class kw of them.
__host__ __device__ inline int phase_start(const Op& op, int q) { return (int)((unsigned)(q * op.groups) / (unsigned)(op.phases << op.sshift)); }
template <int KW>
__host__ __device__ inline int class_start(int p0, int len, int kw) { return p0 + kw * len / KW; }

// GC: cells of a ring slot. NRED: tiles whose partial sums are kept; also the most tiles of a block when ksplit or phases is not 1.
template <int GC, int R, int KW, int NRED>
struct Layout {
    static constexpr int slot = GC * CELL;
    static constexpr int ring = slot * R * KW;
    static constexpr int x = 8 * XROW;
    static constexpr int red = NRED * KW * 512;                  // [tile % NRED][kw][lane] float4
    static constexpr int xred = NRED * 2 * 512;                  // [tile][source block][lane] float4
    static constexpr int bars = (KW * R + 3 * NRED + 1) * 8;     // full[kw][R], red_full[NRED], red_empty[NRED], cross[NRED], x
    static constexpr int total = ring + x + red + xred + bars;
};

// ---- arithmetic of one cell ---------------------------------------------------------------------------------------------------
__device__ __forceinline__ void unpack_word(uint32_t w, uint32_t& a0, uint32_t& a1, uint32_t& a2, uint32_t& a3) {
    a0 = code_pair(w);
    a1 = code_pair(w >> 4);
    a2 = code_pair(w >> 8);
    a3 = code_pair(__funnelshift_r(w, w, 12));
}

// acc += (16 s) * sum(v x) + (b - 16 s) * sum(x), v = 1 + q/16: the codes enter the tensor core exactly, scale and bias are applied in f32.
template <int DEQ>
__device__ __forceinline__ void cell_step(float4& acc, uint4 code, uint2 sb, const uint32_t (&b)[8], float2 sumx) {
    if (DEQ == 2) {  // stream only: touch every word
        acc.x = __uint_as_float(__float_as_uint(acc.x) ^ code.x ^ code.y ^ code.z ^ code.w ^ sb.x ^ sb.y);
        return;
    }
    const uint32_t w[4] = {code.x, code.y, code.z, code.w};
    float4 raw = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a0, a1, a2, a3;
        unpack_word(w[j], a0, a1, a2, a3);
        raw = mma4(a0, a1, a2, a3, b[2 * j], b[2 * j + 1], raw);
    }
    const float s0 = bf16_lo(sb.x), s1 = bf16_lo(sb.y), c0 = bf16_hi(sb.x) - s0, c1 = bf16_hi(sb.y) - s1;
    acc.x = fmaf(s0, raw.x, fmaf(c0, sumx.x, acc.x));
    acc.y = fmaf(s0, raw.y, fmaf(c0, sumx.y, acc.y));
    acc.z = fmaf(s1, raw.z, fmaf(c1, sumx.x, acc.z));
    acc.w = fmaf(s1, raw.w, fmaf(c1, sumx.y, acc.w));
}
// Each row's sum over the group, in the accumulator's column layout: an mma whose A is 1.
__device__ __forceinline__ float2 group_sum(const uint32_t (&b)[8]) {
    const uint32_t one = 0x3f803f80u;
    float4 r = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < 4; j++) r = mma4(one, one, one, one, b[2 * j], b[2 * j + 1], r);
    return make_float2(r.x, r.y);
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
__device__ __forceinline__ float clampf(float v, float l) { return fminf(fmaxf(v, -l), l); }

// One lane's share of a 16 x 8 output tile: tile rows g and g+8, activation rows r and r+1.
__device__ __forceinline__ void store_tile(const Op& op, int tile, float4 v, int rows, int lane) {
    const int g = lane >> 2, r = 2 * (lane & 3);
    v.x *= op.alpha, v.y *= op.alpha, v.z *= op.alpha, v.w *= op.alpha;
    if (op.epi == EPI_SWIGLU) {  // tile rows 0..7 are gate outputs, 8..15 the same channels' up outputs
        uint16_t* y = (uint16_t*)op.y + (size_t)r * op.ldy + tile * 8 + g;
        if (r < rows) y[0] = bf16_bits(clampf(silu(v.x) * v.z, op.limit));
        if (r + 1 < rows) y[op.ldy] = bf16_bits(clampf(silu(v.y) * v.w, op.limit));
    } else if (op.epi == EPI_BF16) {
        uint16_t* y = (uint16_t*)op.y + (size_t)r * op.ldy + tile * 16 + g;
        if (r < rows) y[0] = bf16_bits(v.x), y[8] = bf16_bits(v.z);
        if (r + 1 < rows) y[op.ldy] = bf16_bits(v.y), y[op.ldy + 8] = bf16_bits(v.w);
    } else {
        float* y = (float*)op.y + (size_t)r * op.ldy + tile * 16 + g;
        if (r < rows) y[0] = v.x, y[8] = v.z;
        if (r + 1 < rows) y[op.ldy] = v.y, y[op.ldy + 8] = v.w;
    }
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// ---- a warp's stream -----------------------------------------------------------------------------------------------------------
struct Warp {
    uint32_t ring, bars, xs, red_full, red_empty, cross, xbar;
    char *red, *xred;
    int kw, lane, bid, crank;
    int slot, op;
    uint32_t parity, xparity;
    unsigned tile_no;   // tiles of this block so far, over all ops: picks the reduction buffer and its phase
    unsigned cross_no;  // ops with ksplit 2 so far: phase of the cross barriers
};
// The stream of one phase of one op: this warp's class of every tile of its block's run, `chunk` bytes at a time.
struct Source {
    const uint8_t* p;
    int left;                          // tiles
    unsigned off, bytes, chunk, stride;  // done and all of this tile's class; a slot's worth; from tile to tile
};
template <int GC, int KW>
__device__ __forceinline__ Source source(const Op& op, const Warp& w, int phase) {
    const int cid = w.bid >> op.sshift, rank = w.bid - (cid << op.sshift), q = rank * op.phases + phase;
    const int t0 = run_start(op, cid), p0 = phase_start(op, q), len = phase_start(op, q + 1) - p0;
    const int g0 = class_start<KW>(p0, len, w.kw), cnt = class_start<KW>(p0, len, w.kw + 1) - g0;
    Source s;
    s.p = op.w + ((size_t)t0 * op.groups + g0) * CELL;
    s.left = cnt > 0 ? run_start(op, cid + 1) - t0 : 0;
    s.off = 0, s.bytes = cnt * CELL, s.stride = op.groups * CELL;
    s.chunk = op.kind <= GC ? op.kind * CELL : (op.kind + 1) / 2 * CELL;
    return s;
}
// Keeps the R slots full: runs at most R slots ahead of the consumer, into the next phase or op if need be.
struct Filler {
    Source now, then;
    int slot, pending;
    uint64_t pol;
};
template <int GC, int R>
__device__ __forceinline__ bool fill(Filler& f, const Warp& w) {
    if (f.now.left == 0) {
        f.now = f.then, f.then.left = 0;
        if (f.now.left == 0) return false;
    }
    const unsigned bytes = min(f.now.chunk, f.now.bytes - f.now.off);
    if (w.lane == 0) {
        const uint32_t bar = w.bars + 8 * f.slot;
        mbar_expect(bar, bytes);
        bulk_load(w.ring + f.slot * (GC * CELL), f.now.p + f.now.off, bytes, bar, f.pol);
    }
    f.now.off += bytes;
    if (f.now.off == f.now.bytes) f.now.off = 0, f.now.p += f.now.stride, f.now.left--;
    if (++f.slot == R) f.slot = 0;
    f.pending++;
    return true;
}

// ---- activations ----------------------------------------------------------------------------------------------------------------
// One lane of warp 0: the rows' values of one phase into shared memory.
__device__ __forceinline__ void request_x(const Op& op, int rows, const Warp& w, int phase) {
    const int rank = w.bid & ((1 << op.sshift) - 1), q = rank * op.phases + phase;
    const int p0 = phase_start(op, q), bytes = (phase_start(op, q + 1) - p0) * 128;
    fence_proxy_async();
    mbar_expect(w.xbar, rows * bytes);
    for (int r = 0; r < rows; r++) bulk_load_plain(w.xs + r * XROW, op.x + (size_t)r * op.ldx + p0 * 64, bytes, w.xbar);
}

// ---- reduction -------------------------------------------------------------------------------------------------------------------
// Adds the block's classes of one tile in ascending order. With ksplit 1 that is the result; with ksplit 2 the sum goes to block (i & 1) of
// the cluster. `no` counts the block's tiles (buffer and phase), i those of this op.
template <int KW, int NRED>
__device__ __forceinline__ void collect(const Op& op, unsigned no, int i, int tile, int rows, Warp& w) {
    const int buf = no % NRED, rank = w.bid & op.sshift;
    mbar_wait(w.red_full + 8 * buf, (no / NRED) & 1);
    const float4* red = (const float4*)w.red + buf * KW * 32 + w.lane;
    float4 v = red[0];
#pragma unroll
    for (int k = 1; k < KW; k++) v = add4(v, red[k * 32]);
    __syncwarp();
    if (w.lane == 0) mbar_arrive(w.red_empty + 8 * buf);
    if (op.sshift == 0) {
        store_tile(op, tile, v, rows, w.lane);
    } else {
        const uint32_t to = w.crank - rank + (i & 1);
        st_cluster(map_rank(smem_addr(w.xred) + ((i * 2 + rank) * 32 + w.lane) * 16, to), v);
        __syncwarp();
        if (w.lane == 0) mbar_arrive_cluster(map_rank(w.cross + 8 * i, to));
    }
}

// ---- one op ----------------------------------------------------------------------------------------------------------------------
// One phase: all tiles of the block's run over this warp's class, NG groups or NG - 1. The first phase starts from zero, the others go on from the sums in
// `red`; the last hands the sums over.
template <int NG, int GC, int R, int KW, int NRED, int DEQ>
__device__ __forceinline__ void walk(const Op& op, int phase, int rows, Warp& w, Filler& f) {
    constexpr int CH = NG <= GC ? NG : (NG + 1) / 2;  // cells of a slot
    const int cid = w.bid >> op.sshift, rank = w.bid - (cid << op.sshift), q = rank * op.phases + phase;
    const int p0 = phase_start(op, q), len = phase_start(op, q + 1) - p0, g0 = class_start<KW>(p0, len, w.kw);
    const bool full = class_start<KW>(p0, len, w.kw + 1) - g0 == NG;
    const int tile0 = run_start(op, cid), n = run_start(op, cid + 1) - tile0;
    const bool last = phase == op.phases - 1;
    uint32_t b[NG][8];
    float2 sumx[NG];
    if (DEQ != 2) {
        // Lane (g, t) holds row g, inputs 8t..8t+7 of both halves of the group; the codes are packed to match.
        const uint32_t xa = w.xs + (w.lane >> 2) * XROW + (g0 - p0) * 128 + (w.lane & 3) * 16;
        if (DEQ != 3) mbar_wait(w.xbar, w.xparity);
        STAMP(w, 1);
#pragma unroll
        for (int i = 0; i < NG; i++) {
            uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
            if ((w.lane >> 2) < rows && (i < NG - 1 || full)) lo = lds128(xa + i * 128), hi = lds128(xa + i * 128 + 64);
            b[i][0] = lo.x, b[i][1] = lo.y, b[i][2] = lo.z, b[i][3] = lo.w, b[i][4] = hi.x, b[i][5] = hi.y, b[i][6] = hi.z, b[i][7] = hi.w;
        }
        if (!last && DEQ != 3) {  // the staging area is free for the next phase once everyone has read
            named_barrier(1, KW * 32);
            if (threadIdx.x == 0) request_x(op, rows, w, phase + 1);
        }
#pragma unroll
        for (int i = 0; i < NG; i++) sumx[i] = group_sum(b[i]);
    }
    w.xparity ^= 1;
    int duty = w.kw;  // the next tile of this op that this warp collects
    for (int it = 0; it < n; it++) {
        const unsigned no = w.tile_no + it;
        const int buf = no % NRED;
        float4* red = (float4*)w.red + (buf * KW + w.kw) * 32 + w.lane;
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
        if (phase) acc = *red;
#pragma unroll
        for (int ch = 0; ch < (NG + CH - 1) / CH; ch++) {
            if (ch * CH == NG - 1 && !full) continue;  // a short class that ends with the previous slot
            if (DEQ != 3) mbar_wait(w.bars + 8 * w.slot, w.parity);
            const uint32_t base = w.ring + w.slot * (GC * CELL);
#pragma unroll
            for (int i = 0; i < CH; i++) {
                const int k = ch * CH + i;
                if (k < NG) {
                    if (k < NG - 1 || full) {
                        uint4 code = lds128(base + i * CELL + w.lane * 16);
                        uint2 sb = lds64(base + i * CELL + 512 + (w.lane >> 2) * 8);
                        cell_step<DEQ>(acc, code, sb, b[k], sumx[k]);
                    }
                }
            }
            __syncwarp();
            f.pending--;
            if (DEQ != 3) fill<GC, R>(f, w);
            if (++w.slot == R) w.slot = 0, w.parity ^= 1;
        }
        if (phase == 0) mbar_wait(w.red_empty + 8 * buf, ((no / NRED) & 1) ^ 1);
        *red = acc;
        if (last) {
            __syncwarp();
            if (w.lane == 0) mbar_arrive(w.red_full + 8 * buf);
            if (it == duty + LAG) {
                collect<KW, NRED>(op, w.tile_no + duty, duty, tile0 + duty, rows, w);
                duty += KW;
            }
        }
    }
    if (last) {
        STAMP(w, 2);
        if (duty < n) collect<KW, NRED>(op, w.tile_no + duty, duty, tile0 + duty, rows, w);
        if (op.sshift) {  // the two halves of K, in rank order; runs are shorter than KW, so warp i has tile i
            const int i = w.kw;
            if (i < n && (i & 1) == rank) {
                mbar_wait_cluster(w.cross + 8 * i, w.cross_no & 1);
                const float4* xr = (const float4*)w.xred + i * 64 + w.lane;
                store_tile(op, tile0 + i, add4(xr[0], xr[32]), rows, w.lane);
            }
            w.cross_no++;
        }
        w.tile_no += n;
        STAMP(w, 3);
    }
}
template <int GC, int R, int KW, int NRED, int DEQ>
__device__ __forceinline__ void walk_any(const Op& op, int phase, int rows, Warp& w, Filler& f) {
    if constexpr (KW == 16) {
        switch (op.kind) {
            case 3: walk<3, GC, R, KW, NRED, DEQ>(op, phase, rows, w, f); break;
            default: walk<5, GC, R, KW, NRED, DEQ>(op, phase, rows, w, f); break;
        }
    } else {
        switch (op.kind) {
            case 6: walk<6, GC, R, KW, NRED, DEQ>(op, phase, rows, w, f); break;
            case 9: walk<9, GC, R, KW, NRED, DEQ>(op, phase, rows, w, f); break;
            default: walk<10, GC, R, KW, NRED, DEQ>(op, phase, rows, w, f); break;
        }
    }
}

template <int GC, int R, int KW, int NRED>
__device__ __forceinline__ Warp setup(char* smem, bool clustered) {
    using L = Layout<GC, R, KW, NRED>;
    static_assert(L::total <= 232448, "shared memory of a block");
    Warp w;
    w.lane = threadIdx.x & 31;
    w.kw = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // tells the compiler that it is uniform
    w.ring = smem_addr(smem) + w.kw * R * L::slot;
    w.xs = smem_addr(smem + L::ring);
    w.red = smem + L::ring + L::x, w.xred = w.red + L::red;
    const uint32_t bars = smem_addr(w.xred + L::xred);
    w.bars = bars + w.kw * R * 8, w.red_full = bars + KW * R * 8, w.red_empty = w.red_full + NRED * 8, w.cross = w.red_empty + NRED * 8, w.xbar = w.cross + NRED * 8;
    w.bid = blockIdx.x, w.crank = clustered ? (int)cluster_rank() : 0;
    w.slot = 0, w.parity = 0, w.xparity = 0, w.op = 0, w.tile_no = 0, w.cross_no = 0;
    if (w.lane == 0) {
        for (int i = 0; i < R; i++) mbar_init(w.bars + 8 * i, 1);
        if (w.kw == 0) {
            for (int i = 0; i < NRED; i++) mbar_init(w.red_full + 8 * i, KW), mbar_init(w.red_empty + 8 * i, 1), mbar_init(w.cross + 8 * i, 2);
            mbar_init(w.xbar, 1);
        }
        mbar_init_fence();
    }
    __syncwarp();
    return w;
}
template <int GC, int R, int KW>
__device__ __forceinline__ void start(const Op& op, Warp& w, Filler& f) {
    f.pol = policy_evict_first(), f.slot = 0, f.pending = 0, f.then.left = 0;
    f.now = source<GC, KW>(op, w, 0);
    for (int i = 0; i < R; i++) fill<GC, R>(f, w);
    __syncthreads();
}

// ---- one launch per matmul -------------------------------------------------------------------------------------------------------
template <int GC, int R, int KW, int NRED, int DEQ>
__global__ void __launch_bounds__(KW * 32, 1) qmm_kernel(const __grid_constant__ Op op, int rows, int pdl) {
    extern __shared__ __align__(128) char smem[];
    const bool clustered = op.sshift > 0;
    Warp w = setup<GC, R, KW, NRED>(smem, clustered);
    Filler f;
    start<GC, R, KW>(op, w, f);
    if (clustered) cluster_arrive();  // its wait comes before the first push into a peer
    if (pdl) pdl_launch_dependents(), pdl_wait();
    if (threadIdx.x == 0) request_x(op, rows, w, 0);
    if (clustered) cluster_wait();
    for (int ph = 0; ph < op.phases; ph++) {
        if (ph + 1 < op.phases) f.then = source<GC, KW>(op, w, ph + 1);
        while (DEQ != 3 && f.pending < R && fill<GC, R>(f, w)) {}
        walk_any<GC, R, KW, NRED, DEQ>(op, ph, rows, w, f);
    }
    if (clustered) cluster_arrive(), cluster_wait();  // nobody leaves while a peer may still push
}

// ---- persistent: the whole chain in one launch -------------------------------------------------------------------------------------
// The fillers run on into the next op while the block waits at the grid barrier, so the ring stays full. `counter` is zeroed before the launch;
// each block adds one when its outputs of an op are written, and op i starts when all blocks of the ops before it have. One block per SM.
constexpr int MAX_OPS = 300;
struct OpList {
    int n;
    Op op[MAX_OPS];
};
template <int GC, int R, int KW, int NRED, int DEQ>
__global__ void __launch_bounds__(KW * 32, 1) qmm_persistent(const __grid_constant__ OpList list, int rows, unsigned* counter) {
    extern __shared__ __align__(128) char smem[];
    Warp w = setup<GC, R, KW, NRED>(smem, true);
    Filler f;
    start<GC, R, KW>(list.op[0], w, f);
    cluster_arrive();
    cluster_wait();
    for (int i = 0; i < list.n; i++) {
        const Op& op = list.op[i];
        w.op = i;
        if (threadIdx.x == 0) {  // grid barrier: one lane polls, and asks for the activations when it opens
            while (ld_acquire(counter) < op.before) {}
            STAMP(w, 0);
            request_x(op, rows, w, 0);
        }
        __syncwarp();
        for (int ph = 0; ph < op.phases; ph++) {
            if (ph + 1 < op.phases) f.then = source<GC, KW>(op, w, ph + 1);
            else if (i + 1 < list.n) f.then = source<GC, KW>(list.op[i + 1], w, 0);
            while (f.pending < R && fill<GC, R>(f, w)) {}
            walk_any<GC, R, KW, NRED, DEQ>(op, ph, rows, w, f);
        }
        if (w.kw == 0) {
            named_barrier(2, KW * 32);
            STAMP(w, 4);
            if (w.lane == 0) red_release(counter);
        } else {
            named_arrive(2, KW * 32);
        }
        STAMP(w, 5);
    }
    cluster_arrive();
    cluster_wait();
}
