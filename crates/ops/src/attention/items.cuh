// What blocks do for attention of a round's rows: an item of work is a chunk of pages (on the absolute grid) for one
// lane, one key/value head and some of the lane's rows. Blocks take items in turn; the items follow from LaneStep.
//
// A row's chunks have as many pages as let CHUNKS of them hold all keys that a row at its position may see: a long context
// makes chunks longer, not more. So about one item falls to a block, scratch has a place for each chunk of a row, and a
// row's bits follow from its position. Rows of a lane whose chunks differ are no item together.
//
// HEADS, KV_HEADS, DIM, CAUSAL, WINDOW (0: none), CHUNKS; ROWS: the most of an item.

// Positions by which a chunk of one more pair of pages is due.
#define PAIR (2 * PAGE_TOKENS)
#define CHUNK_STEP (PAIR * CHUNKS)
// Places of a row and head in scratch: a window may begin inside a chunk.
#define PLACES ((CHUNKS + 2) / 2 * 2)

__device__ __forceinline__ u32 start_of(u32 pos) {
    return WINDOW > 0 && pos + 1 > WINDOW ? pos + 1 - WINDOW : 0;
}

// Visible keys of the row at this position.
__device__ __forceinline__ u32 end_of(const LaneStep& step, u32 pos) {
    return CAUSAL ? pos + 1 : step.pos + step.rows;
}

// Pages of a chunk of the row at this position: an even number.
__device__ __forceinline__ u32 chunk_pages(const LaneStep& step, u32 pos) {
    u64 keys = end_of(step, pos), most = (u64)WINDOW + (CAUSAL ? 0 : step.rows);
    if (WINDOW > 0 && keys > most) keys = most;
    return 2 * ((u32)(keys - 1) / CHUNK_STEP + 1);
}

// A row's chunks.
struct Span {
    u32 pages, first, chunks;
};

__device__ __forceinline__ Span span_of(const LaneStep& step, u32 pos) {
    Span span;
    span.pages = chunk_pages(step, pos);
    u32 keys = span.pages * PAGE_TOKENS;
    span.first = start_of(pos) / keys;
    span.chunks = (end_of(step, pos) - 1) / keys + 1 - span.first;
    return span;
}

// Neighbouring rows of a lane, from `row` on, whose chunks have as many pages, and the chunks that they see.
struct Stretch {
    u32 rows, groups;
    Span span;

    __device__ __forceinline__ Stretch(const LaneStep& step, u32 row, u32 group) {
        u32 pos = step.pos + row;
        rows = step.rows - row;
        if (CAUSAL) rows = min(rows, CHUNK_STEP - pos % CHUNK_STEP);
        groups = (rows + group - 1) / group;
        Span last = span_of(step, pos + rows - 1);
        span = span_of(step, pos);
        span.chunks = last.first + last.chunks - span.first;
    }
};

struct Item {
    LaneStep step;
    u32 row, rows;              // of the lane
    u32 kv_head;
    u32 pages, chunk, chunks;   // of a chunk; absolute
    u32 first_page, last_page;  // that some row sees
};

// Walks a block's items in order. Rows are shared out among as many items as there are blocks for.
struct Items {
    const LaneStep* steps;
    u32 count, at, base, lane, row;
    u32 group; // rows of an item
    bool split;

    // All threads of a warp together.
    __device__ __forceinline__ Items(const LaneStep* steps, u32 count, bool split)
        : steps(steps), count(count), at(blockIdx.x), base(0), lane(0), row(0), split(split) {
        u32 all = 0;
        for (u32 l = threadIdx.x % 32; l < count; l += 32) {
            LaneStep step = step_of(steps, l);
            for (u32 r = 0; r < step.rows;) {
                Stretch stretch(step, r, ROWS);
                all += stretch.groups * (split ? stretch.span.chunks : 1) * KV_HEADS;
                r += stretch.rows;
            }
        }
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) all += __shfl_xor_sync(WARP_ALL, all, d);
        u32 parts = 8;
        while (parts > 1 && all * parts > gridDim.x) parts /= 2;
        group = (ROWS + parts - 1) / parts;
    }

    __device__ __forceinline__ bool next(Item& item) {
        for (; lane < count; lane++, row = 0) {
            LaneStep step = step_of(steps, lane);
            while (row < step.rows) {
                Stretch stretch(step, row, group);
                u32 i = at - base, items = stretch.groups * (split ? stretch.span.chunks : 1) * KV_HEADS;
                if (i < items) {
                    u32 nth = i % stretch.groups * group;
                    item.step = step;
                    item.row = row + nth;
                    item.rows = min(stretch.rows - nth, group);
                    i /= stretch.groups;
                    item.kv_head = i % KV_HEADS;
                    item.pages = stretch.span.pages;
                    item.chunk = stretch.span.first + i / KV_HEADS;
                    item.chunks = split ? 1 : stretch.span.chunks;
                    u32 pos = step.pos + item.row;
                    item.first_page = start_of(pos) / PAGE_TOKENS;
                    item.last_page = (end_of(step, pos + item.rows - 1) - 1) / PAGE_TOKENS;
                    at += gridDim.x;
                    return true;
                }
                base += items, row += stretch.rows;
            }
        }
        return false;
    }
};

// The pages of a chunk that some row of the item sees: `first .. end`.
__device__ __forceinline__ void pages_of(const Item& item, u32 chunk, u32& first, u32& end) {
    first = max(chunk * item.pages, item.first_page);
    end = min((chunk + 1) * item.pages, item.last_page + 1);
}
