// A block for every lane: its proposals come one after the other, since with a selector each depends
// on the one before. 16 threads share a candidate's sum; the first warp chooses.
//
// RANK is the selector's, 0 without one.

#define THREADS 512
#define MAX_K 32
// Values of a codebook row that a thread has.
#define OWN ((RANK + 15) / 16)

struct Shared {
    float scores[MAX_K], before[RANK + 1];
    u32 chosen;
};
__shared__ Shared sh;

// This thread's values of a codebook row.
struct Slice {
    u16 x[OWN + 1];
    __device__ __forceinline__ void read(const u16 *codebook, u32 vocab, u32 id) {
        const u16 *row = codebook + (u64)min(id, vocab - 1) * RANK + threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < OWN; i++) x[i] = row[16 * i];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) propose(
    const u32 *candidates, const float *values, const u16 *predecessor, const u16 *successor,
    const float *query, const Params *all_params, const LaneStep *steps, u32 *ids, u32 *proposals, u32 vocab,
    u32 max_rows, u32 k, u32 draft_stride, u32 draft_first) {
    launch_next();
    wait();
    u32 tid = threadIdx.x, c = tid / 16, l = tid % 16, lane = blockIdx.x;
    const LaneStep step = steps[lane];
    if (step.rows < 2) return;
    const Params params = all_params[step.slot];
    const u32 first_row = lane * draft_stride + draft_first;
    bool mine = c < k;

    // What the next proposal needs is read while this one is chosen: its candidate's row, and that
    // candidate's row for the case that it is chosen.
    u32 id = 0;
    float value = 0.0f, q[OWN + 1];
    Slice after, next_before;
    auto read = [&](u32 e) {
        u32 row = first_row + e - 1;
        if (!mine) return;
        id = candidates[row * k + c], value = values[row * k + c];
        if constexpr (RANK > 0) {
#pragma unroll
            for (int i = 0; i < OWN; i++) q[i] = query[(u64)row * RANK + 16 * i + l];
            after.read(successor, vocab, id);
            next_before.read(predecessor, vocab, id);
        }
    };
    read(1);
    if (RANK > 0) {
        const u16 *row = predecessor + (u64)min(ids[step.row0], vocab - 1) * RANK;
        for (int r = tid; r < RANK; r += THREADS) sh.before[r] = bf16_to_f32(row[r]);
        __syncthreads();
    }
    for (u32 e = 1; e < step.rows; e++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            float product = __fmul_rn(sh.before[16 * i + l], q[i]);
            sum = __fmaf_rn(product, bf16_to_f32(after.x[i]), sum);
        }
#pragma unroll
        for (u32 d = 8; d > 0; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, d));
        if (l == 0 && mine) sh.scores[c] = RANK > 0 ? __fadd_rn(value, sum) : value;
        const u32 row = first_row + e - 1;
        const Slice chosen_before = next_before;
        if (e + 1 < step.rows) read(e + 1);
        __syncthreads();
        if (tid < 32) {
            bool there = tid < k;
            u32 token = there ? candidates[row * k + tid] : 0;
            float score = there ? clean(sh.scores[tid]) : NEG_INF;
            float max = warp_max(score);
            u32 w = there ? weight(__fmul_rn(__fsub_rn(score, max), params.inv_temperature)) : 0;
            // If no score is finite, the first candidate has all.
            if (max == NEG_INF) w = tid == 0 ? ONE : 0;
            bool drawn = params.rule == BY_TOKEN || params.rule == BY_BLOCK, chosen;
            if (drawn) {
                u64 until = warp_scan((u64)w), total = __shfl_sync(WARP_ALL, until, 31);
                chosen = below(total, uniform(params, step.pos, FOR_DRAFT, e)) < until;
            } else if (params.rule == INVARIANT) {
                u64 entry = w == 0 ? NO_ENTRY : race_entry_of(params.seed, step.pos + e, token, w);
                chosen = entry == warp_min(entry);
            } else {
                chosen = there && score == max;
            }
            u32 any = __ballot_sync(WARP_ALL, chosen), first = any == 0 ? 0 : __ffs(any) - 1;
            Drawn out(proposals, gridDim.x * (max_rows - 1), lane * (max_rows - 1) + e - 1, k);
            if (there) out.ids[tid] = token, out.weights[tid] = w;
            if (tid == first) {
                *out.count = drawn ? k : 0;
                ids[step.row0 + e] = token;
                sh.chosen = tid;
            }
        }
        __syncthreads();
        if (RANK > 0 && c == sh.chosen) {
#pragma unroll
            for (int i = 0; i < OWN; i++) sh.before[16 * i + l] = bf16_to_f32(chosen_before.x[i]);
        }
        if (RANK > 0) __syncthreads();
    }
}
