// The rule in chunks of 64 rows on the absolute grid, on matrix units (arXiv 2412.06464, section 3.3). With
// G the running sum of g in a chunk, D_ij = e^(G_i - G_j) for i >= j, and rows of K, Q, V the chunk's:
//
//     T = (I + strictly_lower(diag(beta) K Kᵀ ∘ D))⁻¹ diag(beta)      P = Q Kᵀ ∘ D
//     N = T (V - diag(e^G) K S)      O = diag(e^G) Q S + P N      S' = e^(G_last) S + Kᵀ diag(e^(G_last - G)) N
//
// `prepare` makes T, P and the factors of all chunks side by side; `advance` goes through a lane's chunks in
// order. There a warp owns 16 columns of a head and keeps Sᵀ in registers: the results of each product, in the
// layout of the matrix units, are the first operand of the next, so warps exchange nothing.
//
// Hopper's wide products take the second operand from shared memory, once for all warps of a block; elsewhere each warp
// loads it. Operands are pairs of brain floats (hi + lo ≈ x to 2^-17), three products each; sums are f32.
// Rows of a chunk beyond the pass are zeros, and zeros change no bit of other rows.
//
// KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM; TILED: the head map; BLOCK: rows of a deferred pass; WARPS of a
// block of `advance`, STAGES of its chunks.

#define CHUNK 64
#define TILE 16
#define KEYS (KEY_HEADS * KEY_DIM)
#define VALUES (VALUE_HEADS * VALUE_DIM)
#define HALF (BLOCK * (KEYS + VALUES + VALUE_HEADS))
#define GROUP (VALUE_HEADS / KEY_HEADS)

// Whether `advance` has the wide products: their blocks have 64 columns.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WIDE (KEY_DIM % 64 == 0 && WARPS == 4)
#else
#define WIDE 0
#endif

// What scratch holds of a chunk: for each key head K and Q, for each value head T, P, e^G and e^(G_last - G).
// Matrices are hi, then lo; rows of 16-byte pieces, permuted so that 8 rows of a piece lie in different banks, K and Q
// in panels of 64 columns where there are such (see wgmma.cuh).
#define PIECES (KEY_DIM / 8)
#define KEY_PART (2 * CHUNK * KEY_DIM * 2)
#define KEY_BYTES (2 * KEY_PART)
#define SQUARE (CHUNK * CHUNK * 2)
#define VALUE_BYTES (4 * SQUARE + 2 * CHUNK * 4)
#define CHUNK_BYTES (KEY_HEADS * KEY_BYTES + VALUE_HEADS * VALUE_BYTES)
#define PANEL (2 * CHUNK * 128)

// Rows from CHUNK on are those of Q.
__device__ __forceinline__ u32 key_at(u32 row, u32 piece) {
    if constexpr (KEY_DIM % 64 == 0) return piece / 8 * PANEL + row * 128 + (piece % 8 ^ row % 8) * 16;
    return (row * PIECES + piece) * 16;
}
__device__ __forceinline__ u32 square_at(u32 row, u32 piece) {
    return row * 128 + (piece ^ row % 8) * 16;
}

// hi + lo ≈ (x, y).
__device__ __forceinline__ void halve(u32& hi, u32& lo, float x, float y) {
    hi = pack_bf16(x, y);
    lo = pack_bf16(x - __uint_as_float(hi << 16), y - __uint_as_float(hi & 0xffff0000u));
}

// First operand of a product over 16 columns: of two neighbouring tiles of results.
__device__ __forceinline__ void operand(u32 (&hi)[4], u32 (&lo)[4], const float* x) {
#pragma unroll
    for (int i = 0; i < 4; i++) halve(hi[i], lo[i], x[2 * i], x[2 * i + 1]);
}

// Second operands of two neighbouring results, 16 columns of the sum.
struct Pair {
    u32 hi[4], lo[4];
};

// d += a b for N pairs of tiles of results, in an order in which no product waits for the one before it.
template <int N>
__device__ __forceinline__ void multiply(float* const (&d)[N], const u32 (&hi)[4], const u32 (&lo)[4], const Pair (&b)[N]) {
#pragma unroll
    for (int pass = 0; pass < 3; pass++)
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const u32(&of)[4] = pass == 1 ? b[i / 2].lo : b[i / 2].hi;
            float(&to)[4] = *(float(*)[4])(d[i / 2] + i % 2 * 4);
            mma_bf16(to, pass == 0 ? lo : hi, of[i % 2 * 2], of[i % 2 * 2 + 1]);
        }
}

// Chunks that a lane's pass touches, and the rows of one of them.
__device__ __forceinline__ u32 chunks_of(const LaneStep& step) {
    return step.rows == 0 ? 0 : (step.pos + step.rows - 1) / CHUNK - step.pos / CHUNK + 1;
}
__device__ __forceinline__ u32 rows_of(const LaneStep& step, u32 chunk, u32& first) {
    u32 end = (chunk + 1) * CHUNK - step.pos % CHUNK;
    first = chunk == 0 ? 0 : end - CHUNK;
    return min(end, step.rows) - first;
}

__device__ __forceinline__ u32 key_head_of(u32 head) {
    return TILED ? head % KEY_HEADS : head / GROUP;
}

// ---- Chunks side by side ----------------------------------------------------------------------

#define THREADS 256
#define SQUARE_ROW (CHUNK + 4)
#define SPARE_ROW (CHUNK / 2 + 4)

// Columns of K and Q that are in shared memory at a time: a panel where there are such.
#define SOME (KEY_DIM % 64 == 0 ? 64 : KEY_DIM)
#define SOME_PART (2 * CHUNK * SOME * 2)

struct Prepared {
    union {
        // Of K and Q; once they are multiplied, the rest.
        __align__(128) u8 keys[2 * SOME_PART];
        struct {
            u8 p[2 * SQUARE];
            float square[CHUNK][SQUARE_ROW];
            float spare[CHUNK / 2][SPARE_ROW];
        };
    };
    double sums[CHUNK];
    float beta[CHUNK];
};

// Columns of K and Q of a chunk, to shared memory and to scratch.
__device__ __forceinline__ void load_keys(
    Prepared& shared, u8* to, const float* k, const float* q, u64 row0, u32 rows, u32 key_head, u32 columns) {
#pragma unroll 2
    for (u32 i = threadIdx.x; i < 2 * CHUNK * SOME / 8; i += THREADS) {
        u32 which = i / (CHUNK * SOME / 8), row = i / (SOME / 8) % CHUNK, piece = i % (SOME / 8);
        uint4 hi = make_uint4(0, 0, 0, 0), lo = hi;
        if (row < rows) {
            u64 at = (row0 + row) * KEYS + key_head * KEY_DIM + columns + piece * 8;
            const float4* from = (const float4*)((which ? q : k) + at);
            float4 x = from[0], y = from[1];
            halve(hi.x, lo.x, x.x, x.y);
            halve(hi.y, lo.y, x.z, x.w);
            halve(hi.z, lo.z, y.x, y.y);
            halve(hi.w, lo.w, y.z, y.w);
        }
        u32 here = key_at(which * CHUNK + row, piece), there = here + columns / 64 * PANEL;
        *(uint4*)(shared.keys + here) = hi;
        *(uint4*)(shared.keys + here + SOME_PART) = lo;
        *(uint4*)(to + there) = hi;
        *(uint4*)(to + there + KEY_PART) = lo;
    }
}

// d += the lower triangle of K Kᵀ (warps 0 to 3) or Q Kᵀ: 16 rows of a warp.
__device__ __forceinline__ void correlate(float (&d)[CHUNK / 2], const Prepared& shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % 4;
    u32 keys = shared_address(shared.keys), mine = warp / 4 * CHUNK + 16 * band;
    for (u32 step = 0; step < SOME / 16; step++) {
        u32 hi[4], lo[4];
        u32 at = keys + key_at(mine + lane % 16, 2 * step + lane / 16);
        load_matrices(hi, at);
        load_matrices(lo, at + SOME_PART);
#pragma unroll
        for (int p = 0; p < CHUNK / 16; p++) {
            if (p > band) continue;
            Pair b[1];
            at = keys + key_at(16 * p + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
            load_matrices(b[0].hi, at);
            load_matrices(b[0].lo, at + SOME_PART);
            float* const to[1] = {d + 8 * p};
            multiply<1>(to, hi, lo, b);
        }
    }
}

// The running sums of g, and beta. One warp.
__device__ __forceinline__ void load_gates(Prepared& shared, const float* g, const float* beta, u64 row0, u32 rows, u32 head) {
    u32 lane = threadIdx.x % 32;
    double sum[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 row = 32 * half + lane;
        u64 at = (row0 + row) * VALUE_HEADS + head;
        shared.beta[row] = row < rows ? beta[at] : 0.0f;
        sum[half] = row < rows ? g[at] : 0.0f;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            double before = __shfl_up_sync(WARP_ALL, sum[half], d);
            if (lane >= d) sum[half] += before;
        }
    }
    sum[1] += __shfl_sync(WARP_ALL, sum[0], 31);
    shared.sums[lane] = sum[0], shared.sums[32 + lane] = sum[1];
}

// square = beta K Kᵀ ∘ D below the diagonal, else 0 (warps 0 to 3); P = Q Kᵀ ∘ D (the others).
__device__ __forceinline__ void decay(Prepared& shared, const float (&d)[CHUNK / 2]) {
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, band = warp % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 row = 16 * band + 8 * half + g;
        double sum = shared.sums[row];
        float beta = shared.beta[row];
#pragma unroll
        for (int tile = 0; tile < CHUNK / 8; tile++) {
            float x[2] = {0.0f, 0.0f};
            if (tile <= 2 * band + half) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 column = 8 * tile + 2 * t + i;
                    bool seen = warp < 4 ? column < row : column <= row;
                    // A difference of sums: neither factor of it alone would be finite.
                    float by = expf(seen ? (float)(sum - shared.sums[column]) : NEG_INF);
                    x[i] = seen ? by * d[4 * tile + 2 * half + i] : 0.0f;
                }
            }
            if (warp < 4) {
                *(float2*)&shared.square[row][8 * tile + 2 * t] = make_float2(beta * x[0], beta * x[1]);
            } else {
                u32 hi, lo, at = square_at(row, tile) + 4 * t;
                halve(hi, lo, x[0], x[1]);
                *(u32*)(shared.p + at) = hi;
                *(u32*)(shared.p + at + SQUARE) = lo;
            }
        }
    }
}

template <int N> struct Floats;
template <> struct Floats<2> { typedef float2 Vector; };
template <> struct Floats<4> { typedef float4 Vector; };

// to = sign · a b, squares of SIZE, by THREADS / COUNT threads: EACH columns of a row to a thread.
template <int SIZE, int COUNT>
__device__ __forceinline__ void product(float* to, u32 to_row, const float* a, u32 a_row, const float* b, u32 b_row, float sign) {
    constexpr u32 EACH = SIZE * SIZE * COUNT / THREADS;
    typedef typename Floats<EACH>::Vector Vector;
    u32 thread = threadIdx.x % (THREADS / COUNT), i = thread / (SIZE / EACH), c = thread % (SIZE / EACH) * EACH;
    float sum[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) sum[e] = 0.0f;
#pragma unroll 4
    for (u32 k = 0; k < SIZE; k += 4) {
        float4 four = *(const float4*)(a + i * a_row + k);
        float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Vector y = *(const Vector*)(b + (k + j) * b_row + c);
#pragma unroll
            for (int e = 0; e < EACH; e++) sum[e] = __fmaf_rn(x[j], ((const float*)&y)[e], sum[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) sum[e] *= sign;
    *(Vector*)(to + i * to_row + c) = *(const Vector*)sum;
}

// square = (I + square)⁻¹: the blocks of 16 on the diagonal by substitution, a column to a thread; then twice
// the corner below two inverses, -X L Y.
__device__ __forceinline__ void invert(Prepared& shared) {
    u32 warp = threadIdx.x / 32, column = threadIdx.x % 32;
    if (warp < 4 && column < 16) {
        float* block = &shared.square[16 * warp][16 * warp];
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = column == i ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < i; k += 4) {
                float4 four = *(const float4*)(block + i * SQUARE_ROW + k);
                const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4 && k + j < i; j++) sum = __fmaf_rn(-row[j], x[k + j], sum);
            }
            x[i] = sum;
        }
        __syncwarp(0xffff);
#pragma unroll
        for (int i = 0; i < 16; i++) block[i * SQUARE_ROW + column] = x[i];
    }
    __syncthreads();
    {
        u32 which = threadIdx.x / (THREADS / 2);
        float* left = &shared.square[32 * which][32 * which];
        float *corner = left + 16 * SQUARE_ROW, *right = corner + 16;
        float* spare = &shared.spare[16 * which][0];
        product<16, 2>(spare, SPARE_ROW, corner, SQUARE_ROW, left, SQUARE_ROW, 1.0f);
        __syncthreads();
        product<16, 2>(corner, SQUARE_ROW, right, SQUARE_ROW, spare, SPARE_ROW, -1.0f);
        __syncthreads();
    }
    float *left = &shared.square[0][0], *corner = &shared.square[32][0], *right = &shared.square[32][32];
    product<32, 1>(&shared.spare[0][0], SPARE_ROW, corner, SQUARE_ROW, left, SQUARE_ROW, 1.0f);
    __syncthreads();
    product<32, 1>(corner, SQUARE_ROW, right, SQUARE_ROW, &shared.spare[0][0], SPARE_ROW, -1.0f);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) prepare(
    const float* q, const float* k, const float* g, const float* beta, u8* scratch, const LaneStep* steps, u32 lanes) {
    extern __shared__ __align__(128) u8 raw[];
    Prepared& shared = *(Prepared*)raw;
    launch_next();
    wait();
    u32 chunk = blockIdx.x, key_head = blockIdx.y, lane = 0;
    for (; lane < lanes; lane++) {
        u32 chunks = chunks_of(steps[lane]);
        if (chunk < chunks) break;
        chunk -= chunks;
    }
    if (lane == lanes) return;
    u32 first, rows = rows_of(steps[lane], chunk, first), thread = threadIdx.x;
    u64 row0 = steps[lane].row0 + first;
    u8* of_chunk = scratch + (u64)blockIdx.x * CHUNK_BYTES;

    float d[CHUNK / 2];
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) d[i] = 0.0f;
    for (u32 columns = 0; columns < KEY_DIM; columns += SOME) {
        if (columns > 0) __syncthreads();
        load_keys(shared, of_chunk + key_head * KEY_BYTES, k, q, row0, rows, key_head, columns);
        __syncthreads();
        correlate(d, shared);
    }
    for (u32 member = 0; member < GROUP; member++) {
        u32 head = TILED ? key_head + member * KEY_HEADS : key_head * GROUP + member;
        u8* to = of_chunk + KEY_HEADS * KEY_BYTES + head * VALUE_BYTES;
        if (thread < 32) load_gates(shared, g, beta, row0, rows, head);
        __syncthreads();
        decay(shared, d);
        if (thread < CHUNK) {
            float* factors = (float*)(to + 4 * SQUARE);
            factors[thread] = expf((float)shared.sums[thread]);
            factors[CHUNK + thread] = expf((float)(shared.sums[CHUNK - 1] - shared.sums[thread]));
        }
        __syncthreads();
        for (u32 i = thread; i < 2 * SQUARE / 16; i += THREADS)
            ((uint4*)(to + 2 * SQUARE))[i] = ((const uint4*)shared.p)[i];
        invert(shared);
        for (u32 i = thread; i < CHUNK * CHUNK / 8; i += THREADS) {
            u32 row = i / (CHUNK / 8), piece = i % (CHUNK / 8);
            const float4 *from = (const float4*)&shared.square[row][8 * piece], *by = (const float4*)&shared.beta[8 * piece];
            float4 x = from[0], y = from[1], a = by[0], b = by[1];
            uint4 hi, lo;
            halve(hi.x, lo.x, x.x * a.x, x.y * a.y);
            halve(hi.y, lo.y, x.z * a.z, x.w * a.w);
            halve(hi.z, lo.z, y.x * b.x, y.y * b.y);
            halve(hi.w, lo.w, y.z * b.z, y.w * b.w);
            *(uint4*)(to + square_at(row, piece)) = hi;
            *(uint4*)(to + SQUARE + square_at(row, piece)) = lo;
        }
        __syncthreads();
    }
}

// ---- Chunk after chunk ------------------------------------------------------------------------

// At a multiple of what panels want.
#define STAGE_BYTES ((KEY_BYTES + VALUE_BYTES + 1023) / 1024 * 1024)

// Results of products are transposed: element 4 n + 2 h + i of a thread is column g + 8 h of its warp's 16, row (or
// key) 8 n + 2 t + i.
struct State {
    float s[KEY_DIM / 2];
};

// Element offset of (key 8 n + 2 t, column g) in a tile of the state.
__device__ __forceinline__ u32 state_at(u32 n) {
    return (8 * n + 2 * (threadIdx.x % 4)) * TILE + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ void copy_chunk(u8* stage, const u8* of_chunk, u32 head) {
    const u8* keys = of_chunk + key_head_of(head) * KEY_BYTES;
    const u8* values = of_chunk + KEY_HEADS * KEY_BYTES + head * VALUE_BYTES;
    u32 to = shared_address(stage);
    for (u32 i = threadIdx.x * 16; i < KEY_BYTES; i += 32 * WARPS * 16) copy16(to + i, keys + i, 16);
    for (u32 i = threadIdx.x * 16; i < VALUE_BYTES; i += 32 * WARPS * 16) copy16(to + KEY_BYTES + i, values + i, 16);
}

// S = e^g S + k dᵀ for the rows that the last pass left, as in scan.cu.
__device__ __forceinline__ void take_up(State& state, const float* kept, u32 pending, u32 head, u32 column) {
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float *d = kept + BLOCK * KEYS, *decays = d + BLOCK * VALUES;
    for (u32 p = 0; p < pending; p++) {
        const float2* key = (const float2*)(kept + p * KEYS + key_head_of(head) * KEY_DIM) + t;
        float decay = expf(decays[p * VALUE_HEADS + head]);
        float x[2] = {d[p * VALUES + column + g], d[p * VALUES + column + g + 8]};
#pragma unroll
        for (int n = 0; n < KEY_DIM / 8; n++) {
            float2 k = key[4 * n];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& s = state.s[4 * n + i];
                s = __fmaf_rn(i % 2 ? k.y : k.x, x[i / 2], __fmul_rn(decay, s));
            }
        }
    }
}

#if WIDE
// d = (K S)ᵀ, then (Q S)ᵀ.
__device__ __forceinline__ void read_state(float (&d)[CHUNK], const State& state, u32 stage) {
    u32 hi[2][1][4], lo[2][1][4];
#pragma unroll
    for (int step = 0; step < KEY_DIM / 16; step++) {
        u32(&a)[1][4] = hi[step % 2], (&b)[1][4] = lo[step % 2];
        // Those that read a and b before are done.
        wgmma_wait<1>();
        keep(a), keep(b);
        operand(a[0], b[0], state.s + 8 * step);
        keep(a), keep(b);
        u32 at = stage + step / 4 * PANEL + step % 4 * 32;
        wgmma_fence();
        wgmma(d, b[0], rows_along(at), step > 0);
        wgmma(d, a[0], rows_along(at + KEY_PART), 1);
        wgmma(d, a[0], rows_along(at), 1);
        wgmma_commit();
    }
    wgmma_wait<0>();
    keep(d), keep(hi[0]), keep(hi[1]), keep(lo[0]), keep(lo[1]);
}

// d += (M x)ᵀ for a lower triangle M in shared memory.
__device__ __forceinline__ void apply_square(float (&d)[CHUNK / 2], const float (&x)[CHUNK / 2], u32 square) {
    u32 hi[CHUNK / 16][4], lo[CHUNK / 16][4];
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) operand(hi[j], lo[j], x + 8 * j);
    keep(hi), keep(lo);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) {
        wgmma(d, lo[j], rows_along(square + 32 * j), 1);
        wgmma(d, hi[j], rows_along(square + SQUARE + 32 * j), 1);
        wgmma(d, hi[j], rows_along(square + 32 * j), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(d), keep(hi), keep(lo);
}

// S = decay S + Kᵀ x. The products are added up before they meet S, which thus is rounded to nearest once a chunk:
// matrix units cut off.
__device__ __forceinline__ void write_state(State& state, float decay, const float (&x)[CHUNK / 2], u32 stage) {
    u32 hi[CHUNK / 16][4], lo[CHUNK / 16][4];
    float d[KEY_DIM / 64][CHUNK / 2];
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) operand(hi[j], lo[j], x + 8 * j);
    keep(hi), keep(lo);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++)
#pragma unroll
        for (int p = 0; p < KEY_DIM / 64; p++) {
            u32 at = stage + p * PANEL + 2048 * j;
            wgmma<1>(d[p], lo[j], rows_across(at, PANEL), j > 0);
            wgmma<1>(d[p], hi[j], rows_across(at + KEY_PART, PANEL), 1);
            wgmma<1>(d[p], hi[j], rows_across(at, PANEL), 1);
        }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < KEY_DIM / 64; p++) keep(d[p]);
    keep(hi), keep(lo);
#pragma unroll
    for (int i = 0; i < KEY_DIM / 2; i++) state.s[i] = __fmaf_rn(decay, state.s[i], d[i / 32][i % 32]);
}
#else
__device__ __forceinline__ void read_state(float (&d)[CHUNK], const State& state, u32 stage) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) d[i] = 0.0f;
#pragma unroll
    for (int step = 0; step < KEY_DIM / 16; step++) {
        u32 hi[4], lo[4];
        operand(hi, lo, state.s + 8 * step);
#pragma unroll
        for (int p = 0; p < CHUNK / 8; p += 4) {
            Pair b[4];
            float* to[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 at = stage + key_at(16 * (p + i) + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
                load_matrices(b[i].hi, at);
                load_matrices(b[i].lo, at + KEY_PART);
                to[i] = d + 8 * (p + i);
            }
            multiply<4>(to, hi, lo, b);
        }
    }
}

__device__ __forceinline__ void apply_square(float (&d)[CHUNK / 2], const float (&x)[CHUNK / 2], u32 square) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) {
        u32 hi[4], lo[4];
        operand(hi, lo, x + 8 * j);
        Pair b[CHUNK / 16];
        float* to[CHUNK / 16];
#pragma unroll
        for (int p = 0; p < CHUNK / 16; p++) {
            u32 at = square + square_at(16 * p + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2);
            load_matrices(b[p].hi, at);
            load_matrices(b[p].lo, at + SQUARE);
            to[p] = d + 8 * p;
        }
        multiply<CHUNK / 16>(to, hi, lo, b);
    }
}

__device__ __forceinline__ void write_state(State& state, float decay, const float (&x)[CHUNK / 2], u32 stage) {
    constexpr int WIDTH = KEY_DIM / 16 % 4 == 0 ? 4 : KEY_DIM / 16 % 2 == 0 ? 2 : 1;
    u32 lane = threadIdx.x % 32;
    u32 hi[CHUNK / 16][4], lo[CHUNK / 16][4];
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) operand(hi[j], lo[j], x + 8 * j);
#pragma unroll
    for (int n = 0; n < KEY_DIM / 16; n += WIDTH) {
        float d[8 * WIDTH];
        float* to[WIDTH];
#pragma unroll
        for (int i = 0; i < 8 * WIDTH; i++) d[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) to[i] = d + 8 * i;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; j++) {
            Pair b[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                u32 at = stage + key_at(16 * j + lane % 16, 2 * (n + i) + lane / 16);
                load_matrices_transposed(b[i].hi, at);
                load_matrices_transposed(b[i].lo, at + KEY_PART);
            }
            multiply<WIDTH>(to, hi[j], lo[j], b);
        }
#pragma unroll
        for (int i = 0; i < 8 * WIDTH; i++) state.s[8 * n + i] = __fmaf_rn(decay, state.s[8 * n + i], d[i]);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) advance(
    const float* v, float* state, const float* pending, const u8* scratch, float* out, const LaneStep* steps) {
    extern __shared__ u8 unaligned[];
    u8* raw = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    launch_next();
    u32 head = blockIdx.y, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u32 tile = blockIdx.x * WARPS + threadIdx.x / 32, column = head * VALUE_DIM + tile * TILE;
    wait();

    LaneStep step = steps[blockIdx.z];
    if (step.rows + step.pending == 0) return;
    for (u32 lane = 0; lane < blockIdx.z; lane++) scratch += (u64)chunks_of(steps[lane]) * CHUNK_BYTES;
    u32 chunks = chunks_of(step);
    if (chunks > 0) copy_chunk(raw, scratch, head);
    copies_commit();

    float* mine = state + ((u64)(step.slot * VALUE_HEADS + head) * (VALUE_DIM / TILE) + tile) * KEY_DIM * TILE;
    State s;
#pragma unroll
    for (int i = 0; i < KEY_DIM / 2; i++) s.s[i] = mine[state_at(i / 4) + i % 2 * TILE + i % 4 / 2 * 8];
    take_up(s, pending + (u64)(step.slot * 2 + step.parity) * HALF, step.pending, head, column);

    for (u32 chunk = 0; chunk < chunks; chunk++) {
        u32 first, rows = rows_of(step, chunk, first);
        u64 row0 = step.row0 + first;
        if (STAGES > 1) {
            if (chunk + 1 < chunks)
                copy_chunk(raw + (chunk + 1) % STAGES * STAGE_BYTES, scratch + (u64)(chunk + 1) * CHUNK_BYTES, head);
            copies_commit();
        }
        // The values are on their way while K S is computed.
        float x[CHUNK / 2];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            u32 row = i / 4 * 8 + 2 * t + i % 2;
            x[i] = row < rows ? v[(row0 + row) * VALUES + column + g + i % 4 / 2 * 8] : 0.0f;
        }
        copies_wait<STAGES - 1>();
        fence_shared_async();
        __syncthreads();
        u32 stage = shared_address(raw + chunk % STAGES * STAGE_BYTES), squares = stage + KEY_BYTES;
        const float* factors = (const float*)(raw + chunk % STAGES * STAGE_BYTES + KEY_BYTES + 4 * SQUARE);

        float d[CHUNK], n[CHUNK / 2], o[CHUNK / 2];
        read_state(d, s, stage);
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            float decay = factors[i / 4 * 8 + 2 * t + i % 2];
            x[i] = __fmaf_rn(-decay, d[i], x[i]);
            o[i] = decay * d[CHUNK / 2 + i];
            n[i] = 0.0f;
        }
        apply_square(n, x, squares);
        apply_square(o, n, squares + 2 * SQUARE);
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            u32 row = i / 4 * 8 + 2 * t + i % 2;
            if (row < rows) out[(row0 + row) * VALUES + column + g + i % 4 / 2 * 8] = o[i];
            n[i] *= factors[CHUNK + row];
        }
        write_state(s, factors[CHUNK - 1], n, stage);
        __syncthreads();
        if (STAGES == 1) {
            if (chunk + 1 < chunks) copy_chunk(raw, scratch + (u64)(chunk + 1) * CHUNK_BYTES, head);
            copies_commit();
        }
    }
#pragma unroll
    for (int i = 0; i < KEY_DIM / 2; i++) mine[state_at(i / 4) + i % 2 * TILE + i % 4 / 2 * 8] = s.s[i];
}
