// Few-row quantised matmul: y[rows, N] = x[rows, K] * dequant(W)[N, K]^T, W in MLX affine 4 bit, group 64, 1 to 8 rows (NB = 1).
// A study kernel for one H200 and the 27B shapes; REPORT.md has what it reaches and what it does not.
//
// CELL: 16 outputs x 64 inputs (one group deep) = 512 bytes of codes in the order of the mma.m16n8k16 A fragment + 64 bytes of
// (16*scale, bias) pairs: 576 bytes. The packed weight is [tile of 16 outputs][group] cells and nothing else; its offsets depend on no tuning choice.
//
// Arithmetic. A code enters the tensor core exactly, as 1 + q/16 in the mantissa; the ones are taken out through the group's sum of activations,
// scale and bias are applied in f32. bf16 has room for one code in its mantissa (seven integer instructions for eight codes), f16 for two (five). So
// inputs whose magnitude is bounded in advance (a norm's output: at most sqrt(H) * max|w|) come as f16, every second pair of channels times 16
// (|x| must stay below 4094); the others come as bf16.
//
// Work. Tiles are dealt to blocks in nearly equal contiguous runs (to clusters of 2 blocks that halve K when there are few tiles and K is long: ksplit 2).
// K is cut into KW*ksplit contiguous classes of groups, one for each warp. A warp loads the activation fragments of its class once and keeps them in
// registers, then streams tile after tile. Each tile's KW partial sums meet in shared memory, where one warp (another for each tile) adds them
// in ascending order while the others go on. The order depends on N and K alone, never on the number of rows: a row's bits are the same alone
// and in a block.
//
// Stream. Each warp owns R slots of shared memory, refilled with one bulk copy as soon as they are consumed; the copies of the warps of a
// block are adjacent in memory. Weights don't depend on the previous launch, so the ring fills before griddepcontrol.wait.
//
// Names used below: kw warp of the block, kind groups of the longest class (the code path), DEQ 0 the kernel, 2 only streams, 3 only computes (diagnosis).
#pragma once
#include "ptx.cuh"

#ifdef TRACE
__device__ long long* g_trace;  // [op][block][2 warps][8]
#define STAMP(w, k) if ((w).lane == 0 && ((w).kw == 0 || (w).kw == KW - 1)) g_trace[(((size_t)(w).op * gridDim.x + blockIdx.x) * 2 + ((w).kw != 0)) * 8 + (k)] = clock64()
#else
#define STAMP(w, k)
#endif
#ifndef ALLF16
#define ALLF16 false  // true: also the outputs of attention and SwiGLU as f16 (measured, no gain)
#endif
constexpr int CELL = 576;
constexpr int GC = 5;               // groups of a ring slot
constexpr int SLOT = GC * CELL;
constexpr int NRED = 6;             // tiles whose partial sums are kept
constexpr int NX = NRED;            // tiles per block in an op with ksplit 2, at most

enum Epilogue { EPI_BF16 = 0, EPI_SWIGLU = 1, EPI_F32 = 2 };

struct Op {
    const uint8_t* w;    // packed weight
    const uint16_t* x;   // activations, bf16 or f16, in fragment order (below), ldx groups for each block of 8 rows
    void* y;             // bf16 or f16 in fragment order with ldy groups, or f32 [rows][ldy]
    int tiles, groups;   // N/16, K/64
    int ldx, ldy;
    unsigned before;     // tiles of all earlier ops of a persistent chain: the grid barrier opens at this count
    unsigned run_fix;    // tiles per cluster, 8.24 fixed point, rounded up
    int sshift, cshift;  // log2 of ksplit, and of the number of classes KW * ksplit
    int kind;            // groups of the longest class: the code path
    int epi, yf16;       // yf16: the next op reads f16: write that, odd pairs of channels times 16
    float alpha, limit;  // output multiplier and SwiGLU clamp (harness: they keep a chain of random weights finite)
};

// Activations in fragment order: [8 rows][group] -> 1 KB: [half of 32 inputs][lane = row * 4 + t][8 inputs 8t..8t+7 of the half].
__host__ __device__ inline size_t x_index(int row, int k, int ldx) {
    return (((size_t)(row >> 3) * ldx + (k >> 6)) * 2 + (k >> 5 & 1)) * 256 + ((row & 7) * 4 + (k >> 3 & 3)) * 8 + (k & 7);
}
__host__ __device__ inline int run_start(const Op& op, int cid) { return (int)(((unsigned long long)(unsigned)cid * op.run_fix) >> 24); }
__host__ __device__ inline int class_start(const Op& op, int c) { return (c * op.groups) >> op.cshift; }

template <int R, int KW, int NB>
struct Layout {
    static constexpr int ring = SLOT * R * KW;
    static constexpr int red = NRED * KW * NB * 512;           // [tile % NRED][kw][nb][lane] float4
    static constexpr int xred = NX * NB * 512;                 // [tile][nb][lane] float4: the other block's sums
    static constexpr int bars = (KW * R + 2 * NRED + NX + 1) * 8;  // full[kw][R], red_full[NRED], red_empty[NRED], cross[NX], go
    static constexpr int total = ring + red + xred + bars;
};

// ---- arithmetic of one cell ---------------------------------------------------------------------------------------------------
__device__ __forceinline__ void unpack_word(uint32_t w, uint32_t& a0, uint32_t& a1, uint32_t& a2, uint32_t& a3) {
    a0 = code_pair(w);
    a1 = code_pair(w >> 4);
    a2 = code_pair(w >> 8);
    a3 = code_pair(__funnelshift_r(w, w, 12));
}

// acc += (16 s) * sum(v x) + (b - 16 s) * sum(x), v = 1 + q/16: the codes enter the tensor core exactly, scale and bias are applied in f32.
template <int NB, int DEQ>
__device__ __forceinline__ void cell_step(float4 (&acc)[NB], uint4 code, uint2 sb, const uint32_t (&b)[NB][8], const float2 (&sumx)[NB]) {
    if (DEQ == 2) {  // stream only: touch every word
        acc[0].x = __uint_as_float(__float_as_uint(acc[0].x) ^ code.x ^ code.y ^ code.z ^ code.w ^ sb.x ^ sb.y);
        return;
    }
    const uint32_t w[4] = {code.x, code.y, code.z, code.w};
    float4 raw[NB];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a0, a1, a2, a3;
        unpack_word(w[j], a0, a1, a2, a3);
#pragma unroll
        for (int nb = 0; nb < NB; nb++) raw[nb] = mma4(a0, a1, a2, a3, b[nb][2 * j], b[nb][2 * j + 1], j ? raw[nb] : make_float4(0.f, 0.f, 0.f, 0.f));
    }
    const float s0 = bf16_lo(sb.x), s1 = bf16_lo(sb.y), c0 = bf16_hi(sb.x) - s0, c1 = bf16_hi(sb.y) - s1;
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
        acc[nb].x = fmaf(s0, raw[nb].x, fmaf(c0, sumx[nb].x, acc[nb].x));
        acc[nb].y = fmaf(s0, raw[nb].y, fmaf(c0, sumx[nb].y, acc[nb].y));
        acc[nb].z = fmaf(s1, raw[nb].z, fmaf(c1, sumx[nb].x, acc[nb].z));
        acc[nb].w = fmaf(s1, raw[nb].w, fmaf(c1, sumx[nb].y, acc[nb].w));
    }
}

// B fragments of one group, two coalesced 16-byte loads a lane. Lane (g, t) holds row g, inputs 8t..8t+7 of both halves; the codes are packed to match.
// Lanes of absent rows keep their zeros.
template <int NB>
__device__ __forceinline__ void load_x(uint32_t (&b)[NB][8], const uint16_t* x, int ldx, int rows, int lane) {
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
        bool on = nb * 8 + (lane >> 2) < rows;
#pragma unroll
        for (int k = 0; k < 8; k++) b[nb][k] = 0;
        ldx128_if(on, b[nb][0], b[nb][1], b[nb][2], b[nb][3], x + (size_t)nb * ldx * 512);
        ldx128_if(on, b[nb][4], b[nb][5], b[nb][6], b[nb][7], x + (size_t)nb * ldx * 512 + 256);
    }
}
// Each row's sum over the group, in the accumulator's column layout: an mma whose A is 1.
template <int NB>
__device__ __forceinline__ void group_sums(float2 (&sumx)[NB], const uint32_t (&b)[NB][8]) {
    const uint32_t one = 0x3f803f80u;
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
        float4 r = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int j = 0; j < 4; j++) r = mma4(one, one, one, one, b[nb][2 * j], b[nb][2 * j + 1], r);
        sumx[nb] = make_float2(r.x, r.y);
    }
}

// Packed word j of a lane: for the f16 mma's A registers a0 (row g, inputs 4j', 4j'+1), a1 (row g+8, the same), a2 (row g, the next two), a3 (row g+8).
// a0 and a1 hold 1 + q/16, a2 and a3 1 + q/256 (their inputs are scaled by 16).
__device__ __forceinline__ void unpack_f16(uint32_t w, uint32_t& a0, uint32_t& a1, uint32_t& a2, uint32_t& a3) {
    const uint32_t r = __funnelshift_r(w, w, 8);
    a0 = code_high(w), a2 = code_low(w);
    a1 = code_high(r), a3 = code_low(r);
}
struct Sums {
    float4 neg;  // -(sum of even pairs + 16 sum of odd pairs), for the columns of this lane, twice: the mma's initial accumulator
    float2 all;  // sum of all
};
// The same for f16 activations: acc += (16 s) * sum(q/16 x) + b * sum(x)
template <int DEQ>
__device__ __forceinline__ void cell_step_f16(float4& acc, uint4 code, uint2 sb, const uint32_t (&b)[8], const Sums& sum) {
    const uint32_t w[4] = {code.x, code.y, code.z, code.w};
    float4 raw = sum.neg;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a0, a1, a2, a3;
        unpack_f16(w[j], a0, a1, a2, a3);
        raw = mma_f16(a0, a1, a2, a3, b[2 * j], b[2 * j + 1], raw);
    }
    const float s0 = bf16_lo(sb.x), s1 = bf16_lo(sb.y), c0 = bf16_hi(sb.x), c1 = bf16_hi(sb.y);
    acc.x = fmaf(s0, raw.x, fmaf(c0, sum.all.x, acc.x));
    acc.y = fmaf(s0, raw.y, fmaf(c0, sum.all.y, acc.y));
    acc.z = fmaf(s1, raw.z, fmaf(c1, sum.all.x, acc.z));
    acc.w = fmaf(s1, raw.w, fmaf(c1, sum.all.y, acc.w));
}
// One mma for both sums: its A rows 0..7 are -1, rows 8..15 are 1 for the even and 1/16 for the odd pairs.
__device__ __forceinline__ Sums group_sums_f16(const uint32_t (&b)[8]) {
    float4 r = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < 4; j++) r = mma_f16(0xbc00bc00u, 0x3c003c00u, 0xbc00bc00u, 0x2c002c00u, b[2 * j], b[2 * j + 1], r);
    return Sums{make_float4(r.x, r.y, r.x, r.y), make_float2(r.z, r.w)};
}
__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
__device__ __forceinline__ float clampf(float v, float l) { return fminf(fmaxf(v, -l), l); }

// One lane's share of a 16 x 8 output tile: tile rows g and g+8, activation rows r and r+1.
__device__ __forceinline__ void store_tile(const Op& op, int tile, int nb, float4 v, int rows, int lane) {
    const int g = lane >> 2, r = nb * 8 + 2 * (lane & 3);
    v.x *= op.alpha, v.y *= op.alpha, v.z *= op.alpha, v.w *= op.alpha;
    if (op.yf16) {
        const float k = g & 2 ? 16.f : 1.f;
        if (op.epi == EPI_SWIGLU) {
            uint16_t* y = (uint16_t*)op.y + x_index(r, tile * 8 + g, op.ldy);
            if (r < rows) y[0] = f16_bits(k * clampf(silu(v.x) * v.z, op.limit));
            if (r + 1 < rows) y[32] = f16_bits(k * clampf(silu(v.y) * v.w, op.limit));
        } else {
            uint16_t* y = (uint16_t*)op.y + x_index(r, tile * 16 + g, op.ldy);
            if (r < rows) y[0] = f16_bits(k * v.x), y[8] = f16_bits(k * v.z);
            if (r + 1 < rows) y[32] = f16_bits(k * v.y), y[40] = f16_bits(k * v.w);
        }
    } else if (op.epi == EPI_SWIGLU) {  // tile rows 0..7 are gate outputs, 8..15 the same channels' up outputs
        uint16_t* y = (uint16_t*)op.y + x_index(r, tile * 8 + g, op.ldy);
        if (r < rows) y[0] = bf16_bits(clampf(silu(v.x) * v.z, op.limit));
        if (r + 1 < rows) y[32] = bf16_bits(clampf(silu(v.y) * v.w, op.limit));
    } else if (op.epi == EPI_BF16) {
        uint16_t* y = (uint16_t*)op.y + x_index(r, tile * 16 + g, op.ldy);
        if (r < rows) y[0] = bf16_bits(v.x), y[8] = bf16_bits(v.z);
        if (r + 1 < rows) y[32] = bf16_bits(v.y), y[40] = bf16_bits(v.w);
    } else {
        float* y = (float*)op.y + tile * 16 + g;
        if (r < rows) y[(size_t)r * op.ldy] = v.x, y[(size_t)r * op.ldy + 8] = v.z;
        if (r + 1 < rows) y[(size_t)(r + 1) * op.ldy] = v.y, y[(size_t)(r + 1) * op.ldy + 8] = v.w;
    }
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// ---- a warp's stream -----------------------------------------------------------------------------------------------------------
struct Warp {
    uint32_t ring, bars, red_full, red_empty, cross;
    char *red, *xred;
    int kw, lane, bid, crank;
    int slot, op;
    uint32_t parity;
    unsigned tile_no;   // tiles of this block so far, over all ops: picks the reduction buffer and its phase
    unsigned cross_no;  // ops with ksplit 2 so far: phase of the cross barriers
    unsigned* counter;  // finished tiles of the whole grid (persistent)
    uint32_t go;        // mbarrier: warp 0 has seen the grid barrier open
};
// The stream of one op: this warp's class of every tile of its block's run. A long class (more than 10 groups) is walked in two phases: the
// first 9 groups of every tile, then the others.
struct Source {
    const uint8_t* p;
    int left, chunks, chunk;   // tiles left; slots per tile
    unsigned bytes, stride;    // of the class (phase) in one tile; from tile to tile
    const uint8_t* p2;         // second phase
    int left2;
    unsigned bytes2;
};
constexpr int PHASE1 = 9;
template <int KW>
__device__ __forceinline__ Source source(const Op& op, const Warp& w) {
    const int cid = w.bid >> op.sshift, rank = w.bid - (cid << op.sshift), c = rank * KW + w.kw;
    const int t0 = run_start(op, cid), g0 = class_start(op, c), cnt = class_start(op, c + 1) - g0;
    Source s;
    s.p = op.w + ((size_t)t0 * op.groups + g0) * CELL;
    s.left = cnt > 0 ? run_start(op, cid + 1) - t0 : 0;
    const int first = op.kind > 10 ? PHASE1 : cnt;
    s.chunk = 0;
    s.bytes = first * CELL, s.stride = op.groups * CELL;
    s.chunks = (first + GC - 1) / GC;
    s.p2 = s.p + s.bytes, s.bytes2 = (cnt - first) * CELL, s.left2 = cnt > first ? s.left : 0;
    return s;
}
// Keeps the R slots full: runs at most R slots ahead of the consumer, into the next op if need be.
struct Filler {
    Source now, then;
    int slot, pending;
    uint64_t pol;
};
template <int R>
__device__ __forceinline__ bool fill(Filler& f, const Warp& w) {
    if (f.now.left == 0) {
        if (f.now.left2) f.now.p = f.now.p2, f.now.left = f.now.left2, f.now.bytes = f.now.bytes2, f.now.chunks = (f.now.bytes2 + SLOT - 1) / SLOT, f.now.left2 = 0;
        else f.now = f.then, f.then.left = f.then.left2 = 0;
        if (f.now.left == 0) return false;
    }
    const unsigned off = f.now.chunk * SLOT, bytes = min((unsigned)SLOT, f.now.bytes - off);
    if (w.lane == 0) {
        const uint32_t bar = w.bars + 8 * f.slot;
        mbar_expect(bar, bytes);
        bulk_load(w.ring + f.slot * SLOT, f.now.p + off, bytes, bar, f.pol);
    }
    if (++f.now.chunk == f.now.chunks) f.now.chunk = 0, f.now.p += f.now.stride, f.now.left--;
    if (++f.slot == R) f.slot = 0;
    f.pending++;
    return true;
}

// Adds the classes of one tile in order and stores it. `no` counts the block's tiles (buffer and phase), i those of this op.
template <int KW, int NB>
__device__ __forceinline__ void finish_tile(const Op& op, unsigned no, int i, int tile, int rows, Warp& w) {
    const int buf = no % NRED, S = 1 << op.sshift, rank = w.bid & (S - 1), rank_base = w.crank - rank;
    mbar_wait(w.red_full + 8 * buf, (no / NRED) & 1);
    const float4* red = (const float4*)w.red + buf * KW * NB * 32 + w.lane;
    float4 v[NB];
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
        v[nb] = red[nb * 32];
#pragma unroll
        for (int k = 1; k < KW; k++) v[nb] = add4(v[nb], red[(k * NB + nb) * 32]);
    }
    __syncwarp();
    if (w.lane == 0) mbar_arrive(w.red_empty + 8 * buf);
    if (S == 2) {  // the two halves of K in rank order; block (i & 1) of the cluster has the last word on tile i
        if ((i & 1) != rank) {
            const uint32_t a = smem_addr(w.xred) + (i * NB * 32 + w.lane) * 16;
#pragma unroll
            for (int nb = 0; nb < NB; nb++) st_cluster(map_rank(a + nb * 512, rank_base + (i & 1)), v[nb]);
            __syncwarp();
            if (w.lane == 0) mbar_arrive_cluster(map_rank(w.cross + 8 * i, rank_base + (i & 1)));
            return;
        }
        mbar_wait_cluster(w.cross + 8 * i, w.cross_no & 1);
        const float4* xr = (const float4*)w.xred + i * NB * 32 + w.lane;
#pragma unroll
        for (int nb = 0; nb < NB; nb++) v[nb] = rank == 0 ? add4(v[nb], xr[nb * 32]) : add4(xr[nb * 32], v[nb]);
    }
#pragma unroll
    for (int nb = 0; nb < NB; nb++) store_tile(op, tile, nb, v[nb], rows, w.lane);
    if (w.counter) {
        __syncwarp();
        if (w.lane == 0) red_release(w.counter);
    }
}

// All tiles of a block's run over NG groups of this warp's class (NG - 1 if !full). FIRST: start from zero, else go on from the sums in `red`; LAST: hand
// the sums over. The two are apart only for classes of two phases, whose runs have at most NRED tiles.
template <int NG, int R, int KW, int NB, int DEQ, bool F16, bool FIRST, bool LAST>
__device__ __forceinline__ void walk(const Op& op, const uint32_t (&b)[NG][NB][8], bool full, int tile0, int n, int rows, Warp& w, Filler& f) {
    float2 sumx[NG][NB];
    Sums sums[NG];
    if (DEQ != 2)
#pragma unroll
        for (int i = 0; i < NG; i++) {
            if constexpr (F16) sums[i] = group_sums_f16(b[i][0]);
            else group_sums<NB>(sumx[i], b[i]);
        }
    int duty = op.sshift ? 1 << 30 : w.kw;  // the next tile of this op that this warp finishes
    for (int it = 0; it < n; it++) {
        const unsigned no = w.tile_no + it;
        const int buf = no % NRED;
        float4* red = (float4*)w.red + (buf * KW + w.kw) * NB * 32 + w.lane;
        float4 acc[NB];
#pragma unroll
        for (int nb = 0; nb < NB; nb++) acc[nb] = FIRST ? make_float4(0.f, 0.f, 0.f, 0.f) : red[nb * 32];
#pragma unroll
        for (int ch = 0; ch < (NG + GC - 1) / GC; ch++) {
            if (ch * GC == NG - 1 && !full) continue;  // a short class that ends with the previous slot
            if (DEQ != 3) mbar_wait(w.bars + 8 * w.slot, w.parity);
            const uint32_t base = w.ring + w.slot * SLOT;
#pragma unroll
            for (int i = 0; i < GC; i++) {
                const int q = ch * GC + i;
                if (q < NG) {
                    if (q < NG - 1 || full) {
                        uint4 code = lds128(base + i * CELL + w.lane * 16);
                        uint2 sb = lds64(base + i * CELL + 512 + (w.lane >> 2) * 8);
                        if constexpr (F16 && DEQ != 2) cell_step_f16<DEQ>(acc[0], code, sb, b[q][0], sums[q]);
                        else cell_step<NB, DEQ>(acc, code, sb, b[q], sumx[q]);
                    }
                }
            }
            __syncwarp();
            f.pending--;
            if (DEQ != 3) fill<R>(f, w);
            if (++w.slot == R) w.slot = 0, w.parity ^= 1;
        }
        if (FIRST) mbar_wait(w.red_empty + 8 * buf, ((no / NRED) & 1) ^ 1);
#pragma unroll
        for (int nb = 0; nb < NB; nb++) red[nb * 32] = acc[nb];
        if (LAST) {
            __syncwarp();
            if (w.lane == 0) mbar_arrive(w.red_full + 8 * buf);
            if (it == duty + 1) {  // one tile late, so that the others' sums are there
                finish_tile<KW, NB>(op, w.tile_no + duty, duty, tile0 + duty, rows, w);
                duty += KW;
            }
        }
    }
    if (LAST) {
        STAMP(w, 2);
        if (op.sshift) duty = w.kw;
        if (duty < n) finish_tile<KW, NB>(op, w.tile_no + duty, duty, tile0 + duty, rows, w);
        w.tile_no += n;
        w.cross_no += op.sshift;
        STAMP(w, 3);
    }
}
template <int NG, int R, int KW, int NB, int DEQ, bool F16>
__device__ __forceinline__ void consume(const Op& op, int rows, Warp& w, Filler& f) {
    const int cid = w.bid >> op.sshift, rank = w.bid - (cid << op.sshift), c = rank * KW + w.kw;
    const int g0 = class_start(op, c);
    const bool full = class_start(op, c + 1) - g0 == NG;
    const int tile0 = run_start(op, cid), n = run_start(op, cid + 1) - tile0;
    const uint16_t* x = op.x + (size_t)g0 * 512 + w.lane * 8;
    if constexpr (NG <= 10) {
        uint32_t b[NG][NB][8];
#pragma unroll
        for (int i = 0; i < NG; i++)
            if (i < NG - 1 || full) load_x<NB>(b[i], x + i * 512, op.ldx, rows, w.lane);
        STAMP(w, 1);
        walk<NG, R, KW, NB, DEQ, F16, true, true>(op, b, full, tile0, n, rows, w, f);
    } else {
        uint32_t b0[PHASE1][NB][8], b1[NG - PHASE1][NB][8];
#pragma unroll
        for (int i = 0; i < PHASE1; i++) load_x<NB>(b0[i], x + i * 512, op.ldx, rows, w.lane);
#pragma unroll
        for (int i = 0; i < NG - PHASE1; i++)
            if (i < NG - PHASE1 - 1 || full) load_x<NB>(b1[i], x + (PHASE1 + i) * 512, op.ldx, rows, w.lane);
        STAMP(w, 1);
        walk<PHASE1, R, KW, NB, DEQ, F16, true, false>(op, b0, true, tile0, n, rows, w, f);
        walk<NG - PHASE1, R, KW, NB, DEQ, F16, false, true>(op, b1, full, tile0, n, rows, w, f);
    }
}
template <int R, int KW, int NB, int DEQ>
__device__ __forceinline__ void consume_any(const Op& op, int rows, Warp& w, Filler& f) {
    // Inputs that a norm has bounded come as f16 (kind 5 here: the input projections, gate/up, head); the others as bf16, unless ALLF16.
    if constexpr (KW == 16) {
        switch (op.kind) {
            case 3: consume<3, R, KW, NB, DEQ, ALLF16>(op, rows, w, f); break;
            case 5: consume<5, R, KW, NB, DEQ, true>(op, rows, w, f); break;
            default: consume<9, R, KW, NB, DEQ, ALLF16>(op, rows, w, f); break;
        }
    } else {
        switch (op.kind) {
            case 6: consume<6, R, KW, NB, DEQ, ALLF16>(op, rows, w, f); break;
            case 10: consume<10, R, KW, NB, DEQ, true>(op, rows, w, f); break;
            default: consume<17, R, KW, NB, DEQ, ALLF16>(op, rows, w, f); break;
        }
    }
}

template <int R, int KW, int NB>
__device__ __forceinline__ Warp setup(char* smem, bool clustered) {
    using L = Layout<R, KW, NB>;
    static_assert(L::total <= 232448, "shared memory of a block");
    Warp w;
    w.lane = threadIdx.x & 31;
    w.kw = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // tells the compiler that it is uniform
    w.ring = smem_addr(smem) + w.kw * R * SLOT;
    w.red = smem + L::ring, w.xred = w.red + L::red;
    const uint32_t bars = smem_addr(w.xred + L::xred);
    w.bars = bars + w.kw * R * 8, w.red_full = bars + KW * R * 8, w.red_empty = w.red_full + NRED * 8, w.cross = w.red_empty + NRED * 8;
    w.bid = blockIdx.x, w.crank = clustered ? (int)cluster_rank() : 0;
    w.slot = 0, w.parity = 0, w.op = 0, w.tile_no = 0, w.cross_no = 0, w.counter = nullptr, w.go = w.cross + NX * 8;
    if (w.lane == 0) {
        for (int i = 0; i < R; i++) mbar_init(w.bars + 8 * i, 1);
        if (w.kw == 0) {
            for (int i = 0; i < NRED; i++) mbar_init(w.red_full + 8 * i, KW), mbar_init(w.red_empty + 8 * i, 1);
            for (int i = 0; i < NX; i++) mbar_init(w.cross + 8 * i, 1);
            mbar_init(w.go, 1);
        }
        mbar_init_fence();
    }
    __syncwarp();
    return w;
}
template <int R, int KW>
__device__ __forceinline__ void start(const Op& op, Warp& w, Filler& f) {
    f.pol = policy_evict_first(), f.slot = 0, f.pending = 0, f.then.left = f.then.left2 = 0;
    f.now = source<KW>(op, w);
    for (int i = 0; i < R; i++) fill<R>(f, w);
    __syncthreads();
}

// ---- one launch per matmul -------------------------------------------------------------------------------------------------------
template <int R, int KW, int NB, int DEQ, int BPSM>
__global__ void __launch_bounds__(KW * 32, BPSM) qmm_kernel(const __grid_constant__ Op op, int rows, int pdl) {
    extern __shared__ __align__(128) char smem[];
    const bool clustered = op.sshift > 0;
    Warp w = setup<R, KW, NB>(smem, clustered);
    Filler f;
    start<R, KW>(op, w, f);
    if (clustered) cluster_arrive();  // its wait comes before the first push into a peer
    if (pdl) pdl_launch_dependents(), pdl_wait();
    if (clustered) cluster_wait();
    consume_any<R, KW, NB, DEQ>(op, rows, w, f);
    if (clustered) cluster_arrive(), cluster_wait();  // nobody leaves while a peer may still push
}

// ---- persistent: the whole chain in one launch -------------------------------------------------------------------------------------
// The fillers run on into the next op while the block reduces and waits at the grid barrier, so the ring never empties.
// `counter` is zeroed before the launch; each finished tile adds one, and op i starts when all tiles of the ops before it are there. One block per SM.
constexpr int MAX_OPS = 300;
struct OpList {
    int n;
    Op op[MAX_OPS];
};
template <int R, int KW, int NB, int DEQ>
__global__ void __launch_bounds__(KW * 32, 1) qmm_persistent(const __grid_constant__ OpList list, int rows, unsigned* counter) {
    extern __shared__ __align__(128) char smem[];
    Warp w = setup<R, KW, NB>(smem, true);
    Filler f;
    start<R, KW>(list.op[0], w, f);
    cluster_arrive();
    cluster_wait();
    w.counter = counter;
    for (int i = 0; i < list.n; i++) {
        w.op = i;
        if (i + 1 < list.n) f.then = source<KW>(list.op[i + 1], w);
        while (f.pending < R && fill<R>(f, w)) {}
        if (i > 0) {  // grid barrier: one warp of the block polls
            if (w.kw == 0) {
                if (w.lane == 0) {
                    while (ld_acquire(counter) < list.op[i].before) {}
                    mbar_arrive(w.go);
                }
                __syncwarp();
            } else {
                mbar_wait(w.go, (i - 1) & 1);
            }
        }
        STAMP(w, 0);
        consume_any<R, KW, NB, DEQ>(list.op[i], rows, w, f);
        STAMP(w, 5);
    }
    cluster_arrive();
    cluster_wait();
}
