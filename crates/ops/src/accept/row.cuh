// What the two kernels of accept share: `accept_rows` makes every row's distribution and pick, and
// `accept_lanes` applies the rule to every lane.
//
// All sums are integers and all orders are total, so nothing depends on the order of work.

#define THREADS 512
#define WARPS (THREADS / 32)
#define MAX_PARTS 16
#define MAX_ROWS 32
#define MAX_K 32

// One row's part of scratch: this, and then a logit or weight for every token. The order of the
// tokens is that of the spans: warp w of part p has tokens (p WARPS + w) span and on.
struct Row {
    u64 total;
    u32 unused, pick;
    float log_sum;
    u32 degenerate, padding[10];
    // The weight of every span. In a span without weight, the tokens' weights are not written.
    u64 sums[MAX_PARTS * WARPS];

    __device__ __forceinline__ u32 *tokens() { return (u32 *)(this + 1); }
};
__device__ __forceinline__ Row *row_of(u8 *scratch, u32 row, u32 bytes) {
    return (Row *)(scratch + (u64)row * bytes);
}

// Which rows of a lane have logits, the position before the first one's token, and where they are.
struct Judged {
    u32 rows, base, first;
    __device__ Judged(const LaneStep &step, u32 lane, u32 last) {
        rows = last ? min(step.rows, 1u) : step.rows;
        base = last && step.rows > 0 ? step.pos + step.rows - 1 : step.pos;
        first = last ? lane : step.row0;
    }
};
