// A block for every lane. Without a selector every warp chooses on its own. With one, a proposal
// depends on the one before: all is made ready that does not, and then they follow one another.
//
// RANK is the selector's, a multiple of 16; 0 without one. STAGED: the candidates' rows of both
// codebooks fit shared memory.

#define THREADS 256
#define MAX_K 32
// Proposals made ready at a time.
#define AHEAD 32
// Elements from one staged row to the next: what the threads of a warp read at once lies in
// different banks.
#define PITCH (RANK + 16)

struct Shared {
    u32 tokens[AHEAD][MAX_K];
    float scores[AHEAD][MAX_K];
    // By rule: what the candidates run the race with, or the number of a draw.
    float times[AHEAD][MAX_K];
    u32 draws[AHEAD];
    // The row of the token before, times the query.
    float products[RANK + 4];
    u32 chosen;
};
__shared__ __align__(16) Shared sh;
// Of each candidate, its successor row and its predecessor row.
extern __shared__ uint4 staged[];

struct Codebooks {
    const u16 *predecessor, *successor;
    const float *query;
    u32 vocab;
    __device__ __forceinline__ u64 at(u32 id) const { return (u64)min(id, vocab - 1) * RANK; }
};

// Rows of candidate c of proposal i.
__device__ __forceinline__ const u16 *after_row(const Codebooks &books, u32 i, u32 c, u32 k) {
    if (STAGED) return (const u16 *)staged + (i * k + c) * 2 * PITCH;
    return books.successor + books.at(sh.tokens[i][c]);
}
__device__ __forceinline__ const u16 *before_row(const Codebooks &books, u32 i, u32 c, u32 k) {
    if (STAGED) return (const u16 *)staged + ((i * k + c) * 2 + 1) * PITCH;
    return books.predecessor + books.at(sh.tokens[i][c]);
}

// Copies 16 bytes to shared memory, some time.
__device__ __forceinline__ void copy16(u32 to, const u16 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Brings the rows of the candidates of n proposals to shared memory.
__device__ __forceinline__ void stage(const Codebooks &books, u32 n, u32 k) {
#if RANK > 0 && STAGED
    const u32 pieces = RANK / 8;
    for (u32 at = threadIdx.x; at < n * k * pieces; at += THREADS) {
        u32 row = at / pieces, piece = at % pieces;
        u64 from = books.at(sh.tokens[row / k][row % k]) + 8 * piece;
        u32 to = (u32)__cvta_generic_to_shared(staged + row * 2 * (PITCH / 8) + piece);
        copy16(to, books.successor + from);
        copy16(to + 2 * PITCH, books.predecessor + from);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// This thread's share of a row of queries.
struct Query {
    float q[(RANK + THREADS - 1) / THREADS + 1];
    __device__ __forceinline__ void read(const float *row) {
#pragma unroll
        for (int j = 0; THREADS * j < RANK; j++) {
            int r = THREADS * j + threadIdx.x;
            if (r < RANK) q[j] = row[r];
        }
    }
};

// Adds sum(before query after) to the scores of proposal i.
__device__ __forceinline__ void
rescore(const Codebooks &books, const u16 *before, const Query &query, u32 i, u32 k) {
#if RANK > 0
    u32 tid = threadIdx.x, c = tid / 4, t = tid % 4;
#pragma unroll
    for (int j = 0; THREADS * j < RANK; j++) {
        u32 r = THREADS * j + tid;
        if (r < RANK) sh.products[r] = __fmul_rn(bf16_to_f32(before[r]), query.q[j]);
    }
    __syncthreads();
    if (tid < 4 * MAX_K) {
        // 4 threads have a candidate, and of its 16 lanes 4 each.
        const uint2 *after = (const uint2 *)after_row(books, i, min(c, k - 1), k) + t;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 16
        for (u32 r = 0; r < RANK / 16; r++) {
            uint2 v = after[4 * r];
            float4 p = *(const float4 *)&sh.products[16 * r + 4 * t];
            sum[0] = __fmaf_rn(p.x, __uint_as_float(v.x << 16), sum[0]);
            sum[1] = __fmaf_rn(p.y, __uint_as_float(v.x & 0xffff0000), sum[1]);
            sum[2] = __fmaf_rn(p.z, __uint_as_float(v.y << 16), sum[2]);
            sum[3] = __fmaf_rn(p.w, __uint_as_float(v.y & 0xffff0000), sum[3]);
        }
        // Lanes l and l + 8, then l and l + 4, and so on.
#pragma unroll
        for (u32 d = 2; d > 0; d >>= 1)
#pragma unroll
            for (u32 l = 0; l < 4; l++) sum[l] = __fadd_rn(sum[l], __shfl_xor_sync(WARP_ALL, sum[l], d));
        float all = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
        if (t == 0 && c < k) sh.scores[i][c] = __fadd_rn(sh.scores[i][c], all);
    }
    __syncthreads();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) propose(
    const u32 *candidates, const float *values, const u16 *predecessor, const u16 *successor,
    const float *query, const Params *all_params, const LaneStep *steps, u32 *ids, u32 *proposals, u32 vocab,
    u32 max_rows, u32 k, u32 draft_stride, u32 draft_first) {
    launch_next();
    wait();
    u32 tid = threadIdx.x, warp = tid / 32, c = tid % 32, lane = blockIdx.x;
    const LaneStep step = steps[lane];
    if (step.rows < 2) return;
    const Params params = all_params[step.slot];
    const Codebooks books = {predecessor, successor, query, vocab};
    const bool drawn = params.rule == BY_TOKEN || params.rule == BY_BLOCK, there = c < k;
    u32 token_before = RANK > 0 ? ids[step.row0] : 0;
    for (u32 first = 1; first < step.rows; first += AHEAD) {
        // Proposals first.. have candidates in rows row.. of the draft.
        const u32 n = min(step.rows - first, (u32)AHEAD), row = lane * draft_stride + draft_first + first - 1;
        for (u32 i = warp; i < n; i += THREADS / 32) {
            if (there) {
                sh.tokens[i][c] = candidates[(row + i) * k + c];
                sh.scores[i][c] = values[(row + i) * k + c];
            }
        }
        __syncthreads();
        stage(books, n, k);
        for (u32 i = warp; i < n; i += THREADS / 32) {
            u32 token = there ? sh.tokens[i][c] : 0, position = step.pos + first + i;
            if (params.rule == INVARIANT) {
                uint4 words = philox(token / 64 * 16 + token % 16, position, FOR_RACE, params.seed);
                sh.times[i][c] = exponential_of(word_of(words, token));
            }
            if (c == 0 && drawn) sh.draws[i] = uniform(params, step.pos, FOR_DRAFT, first + i);
        }
        __syncthreads();
        const u16 *before = books.predecessor + books.at(token_before);
        Query now, next;
        if (RANK > 0) next.read(query + (u64)row * RANK);
        for (u32 i = RANK > 0 ? 0 : warp; i < n; i += RANK > 0 ? 1 : THREADS / 32) {
            now = next;
            if (RANK > 0 && i + 1 < n) next.read(query + (u64)(row + i + 1) * RANK);
            rescore(books, before, now, i, k);
            if (RANK == 0 || warp == 0) {
                u32 token = there ? sh.tokens[i][c] : 0;
                float score = there ? clean(sh.scores[i][c]) : NEG_INF;
                float max = unordered(__reduce_max_sync(WARP_ALL, ordered(score)));
                u32 w = there ? weight(__fmul_rn(__fsub_rn(score, max), params.inv_temperature)) : 0;
                // If no score is finite, the first candidate has all.
                if (max == NEG_INF) w = c == 0 ? ONE : 0;
                bool chosen;
                if (drawn) {
                    u64 until = warp_scan((u64)w), total = __shfl_sync(WARP_ALL, until, 31);
                    chosen = below(total, sh.draws[i]) < until;
                } else if (params.rule == INVARIANT) {
                    float time = __fdiv_rn(sh.times[i][c], __uint2float_rn(w));
                    u64 entry = w == 0 ? NO_ENTRY : (u64)__float_as_uint(time) << 32 | token;
                    chosen = entry == warp_min(entry);
                } else {
                    chosen = there && score == max;
                }
                u32 any = __ballot_sync(WARP_ALL, chosen), winner = any == 0 ? 0 : __ffs(any) - 1;
                u32 e = first + i;
                Drawn out(proposals, gridDim.x * (max_rows - 1), lane * (max_rows - 1) + e - 1, k);
                if (there) out.ids[c] = token, out.weights[c] = w;
                if (c == winner) {
                    *out.count = drawn ? k : 0;
                    ids[step.row0 + e] = token;
                    if (RANK > 0) sh.chosen = c;
                }
            }
            if (RANK > 0) {
                __syncthreads();
                before = before_row(books, i, sh.chosen, k);
                token_before = sh.tokens[i][sh.chosen];
            }
        }
        __syncthreads();
    }
}
