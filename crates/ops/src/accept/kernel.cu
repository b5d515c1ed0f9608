// Two launches. `accept_rows` makes every row's distribution and pick; a row belongs to a cluster of
// blocks, each of which holds its part in shared memory (NEAR) or in scratch. `accept_lanes` applies
// the rule to every lane.
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

// ---- rows ----

// Tokens that the end of a search looks at one by one.
#define FEW 256
#define NONE (~0u)
// Loads of a thread that are under way at once, of four logits each.
#define BATCH 8

struct Shared {
    u64 warp[WARPS], exchange[2][MAX_PARTS];
    // Sums by digit over this block's tokens: 64 bits, or the low and the high half of the amounts summed
    // apart. And over all, the largest digit first.
    u64 histogram[256], sums[256];
    // Entries of the first block's list, and what it found.
    u64 list[FEW];
    u64 before, answer[3];
    u32 listed, full, digit;
};
__shared__ Shared sh;
extern __shared__ u32 near_tokens[];

enum { SUM, LEAST, MOST };
template <int KIND>
__device__ __forceinline__ u64 combined(u64 a, u64 b) {
    return KIND == SUM ? a + b : KIND == LEAST ? min(a, b) : max(a, b);
}
template <int KIND>
__device__ __forceinline__ u64 warp_all(u64 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = combined<KIND>(x, __shfl_xor_sync(WARP_ALL, x, d));
    return x;
}

// A thread's place: it works on tokens of `count` from `first` on, shared with its warp: four
// neighbours at a time.
struct Place {
    u32 part, parts, tid, warp, lane, first, count, phase;

    // Combines a number over the cluster.
    template <int KIND>
    __device__ u64 all(u64 x) {
        const u64 none = KIND == LEAST ? ~(u64)0 : 0;
        x = warp_all<KIND>(x);
        if (lane == 0) sh.warp[warp] = x;
        __syncthreads();
        phase ^= 1;
        u64 *exchange = sh.exchange[phase];
        if (warp == 0) {
            x = warp_all<KIND>(lane < WARPS ? sh.warp[lane] : none);
            if (lane < parts) peer_put(&exchange[part], lane, x);
        }
        // Two phases are enough: who writes one for the second time has met all who read it.
        cluster_sync(parts);
        return warp_all<KIND>(lane < parts ? exchange[lane] : none);
    }

    // Calls use(value, id) for this thread's tokens, where any of four neighbours has `least` or more.
    // Behind the last there may be some of value 0.
    template <class Use>
    __device__ __forceinline__ void each(const u32 *tokens, u32 least, Use use) const {
#pragma unroll 4
        for (u32 j = 4 * lane; j < count; j += 128) {
            uint4 v = *(const uint4 *)(tokens + j);
            if (max(max(v.x, v.y), max(v.z, v.w)) < least) continue;
            use(v.x, first + j);
            use(v.y, first + j + 1);
            use(v.z, first + j + 2);
            use(v.w, first + j + 3);
        }
    }
    // The same, and the results take the place of the values; 0 that of those left out.
    template <class Of>
    __device__ __forceinline__ void map(u32 *tokens, u32 least, Of of) const {
#pragma unroll 2
        for (u32 j = 4 * lane; j < count; j += 128) {
            uint4 v = *(const uint4 *)(tokens + j);
            if (max(max(v.x, v.y), max(v.z, v.w)) < least) {
                v = make_uint4(0, 0, 0, 0);
            } else {
                v.x = of(v.x, first + j);
                v.y = of(v.y, first + j + 1);
                v.z = of(v.z, first + j + 2);
                v.w = of(v.w, first + j + 3);
            }
            *(uint4 *)(tokens + j) = v;
        }
    }
};

// From a processed logit to its weight.
struct Scale {
    float max, inv_temperature, floor;
    // Above the likeliest, scaled; negative infinity if it can't weigh anything.
    __device__ __forceinline__ float operator()(u32 key) const {
        float z = unordered(key);
        float x = __fmul_rn(__fsub_rn(z, max), inv_temperature);
        return key != 0 && z >= floor && x >= LIGHTEST ? x : NEG_INF;
    }
    // Keys below this weigh nothing.
    __device__ __forceinline__ u32 least() const {
        float far = __fsub_rd(max, __fdiv_ru(-LIGHTEST + 0.5f, inv_temperature));
        u32 key = inv_temperature > 0.0f ? ordered(far) : 1;
        return floor > NEG_INF ? ::max(key, ordered(floor)) : key;
    }
};

// The tokens that stay: of larger values than this, or of this up to an id.
struct Cut {
    u32 value, id;
    // Sum of the amounts of what stays; 0 if not known.
    u64 total;
    __device__ __forceinline__ bool keeps(u32 v, u32 i) const {
        return v > value || (v == value && i <= id);
    }
};

// A search runs over the orders of tokens: the larger, the earlier a token stays. No two are equal.
// The highest byte spreads what matters over its range; 0 is for tokens out of the question.

// The k largest logits. From the top: 12 bits of the distance from the largest, 32 of the key, 20 of
// the id.
struct ByLogit {
    Scale scale;
    __device__ __forceinline__ u64 order(u32 key, u32 id) const {
        u32 far = min((u32)__fmul_rn(__fsub_rn(scale.max, unordered(key)), 128.0f), 4095u);
        u64 order = (u64)(4095 - far) << 52 | (u64)key << 20 | (~id & 0xfffff);
        return scale(key) == NEG_INF ? 0 : order;
    }
    // No value below this has an order with such a highest byte, or a larger one.
    __device__ __forceinline__ u32 least(u32 digit) const {
        u32 key = ordered(__fsub_rd(scale.max, (float)(256 - digit) * 0.125f));
        return digit == 0 ? 1 : key;
    }
    static __device__ __forceinline__ u32 value(u64 order) { return (u32)(order >> 20); }
    static __device__ __forceinline__ u32 id(u64 order) { return ~(u32)order & 0xfffff; }
    static __device__ __forceinline__ u32 amount(u64) { return 1; }
};
// The heaviest. Those of weight `light` never reach the limit. Weights are floats without loss: 28
// bits of that float, less its smallest exponent, and 20 of the id.
struct ByWeight {
    u32 light;
    __device__ __forceinline__ u64 order(u32 weight, u32 id) const {
        u32 bits = __float_as_uint(__uint2float_rn(weight)) - (127u << 23);
        u64 order = (u64)bits << 36 | (u64)(~id & 0xfffff) << 16 | 1;
        return weight <= light ? 0 : order;
    }
    __device__ __forceinline__ u32 least(u32 digit) const { return max(value((u64)digit << 56), light + 1); }
    static __device__ __forceinline__ u32 value(u64 order) {
        return __float2uint_rz(__uint_as_float((u32)(order >> 36) + (127u << 23)));
    }
    static __device__ __forceinline__ u32 id(u64 order) { return ~(u32)(order >> 16) & 0xfffff; }
    static __device__ __forceinline__ u32 amount(u64 order) { return value(order); }
};

// Orders of at least `floor` that have the bits of `prefix` above the lowest `below`.
struct Range {
    u64 floor, prefix;
    u32 below;
    __device__ __forceinline__ bool has(u64 order) const {
        return order >= floor && (below == 64 || order >> below == prefix);
    }
    // The byte that the search goes on with.
    __device__ __forceinline__ u32 digit(u64 order) const { return (u32)(order >> (below - 8)) & 255; }
    __device__ __forceinline__ void enter(u32 digit) {
        prefix = prefix << 8 | digit;
        below -= 8;
    }
    // The least highest byte.
    __device__ __forceinline__ u32 highest() const {
        return (u32)((below == 64 ? floor : max(floor, prefix << below)) >> 56);
    }
    __device__ __forceinline__ u64 last() const { return prefix << below | (((u64)1 << below) - 1); }
};

// Empties the block's sums for the next `pick`.
__device__ __forceinline__ void clear(const Place &place) {
    if (place.tid < 256) sh.histogram[place.tid] = 0;
    __syncthreads();
}
__device__ __forceinline__ void add(u32 digit, u32 amount) {
#if NEAR
    // Sums of halves fit: a part has less than 2^16 tokens.
    u32 *halves = (u32 *)&sh.histogram[digit];
    if (amount & 0xffff) atomicAdd(&halves[0], amount & 0xffff);
    if (amount >> 16) atomicAdd(&halves[1], amount >> 16);
#else
    atomicAdd(&sh.histogram[digit], (u64)amount);
#endif
}
// The digit at which the sum over the cluster, from the largest down, reaches the limit: NONE if it
// doesn't. Then sh.before has the sum over the larger digits.
__device__ __forceinline__ u32 pick(const Place &place, u64 before, u64 limit) {
    cluster_sync(place.parts);
    // Each block adds up its share of the digits, a thread for each of a digit's parts.
    if (place.tid < 256) {
        u32 part = place.tid & (place.parts - 1), digit = place.part * (256 / place.parts) + place.tid / place.parts;
        u64 v = peer_get(&sh.histogram[255 - digit], part), high = NEAR ? v >> 32 : 0;
        u64 sum = NEAR ? (u32)v : v;
        for (u32 d = 1; d < place.parts; d <<= 1) {
            sum += __shfl_xor_sync(WARP_ALL, sum, d);
            high += __shfl_xor_sync(WARP_ALL, high, d);
        }
        peer_put(&sh.sums[digit], part, sum + (high << 16));
    }
    cluster_sync(place.parts);
    u64 sum = place.tid < 256 ? sh.sums[place.tid] : 0, until = warp_scan(sum);
    if (place.lane == 31) sh.warp[place.warp] = until;
    __syncthreads();
    until += before;
    for (u32 w = 0; w < place.warp; w++) until += sh.warp[w];
    bool here = place.tid < 256 && until - sum < limit && limit <= until;
    if (here) sh.digit = 255 - place.tid, sh.before = until - sum;
    return __syncthreads_or(here) ? sh.digit : NONE;
}

// The sum of the amounts of larger orders on the first block's list.
template <class By>
__device__ __forceinline__ u64 earlier(u32 n, u64 order) {
    u64 sum = 0;
#pragma unroll 4
    for (u32 i = 0; i < n; i++) {
        u64 other = sh.list[i];
        if (other > order) sum += By::amount(other);
    }
    return sum;
}

// Brings the tokens of a range to the first block, to which it says whether they were few. `largest`
// is the largest order of this thread's tokens.
template <class By>
__device__ __forceinline__ bool bring(const Place &place, const u32 *tokens, const By &by, u64 largest, const Range &range) {
    if (largest >= range.floor) place.each(tokens, by.least(range.highest()), [&](u32 value, u32 id) {
        u64 order = by.order(value, id);
        if (!range.has(order) || *(volatile u32 *)&sh.full) return;
        u32 at = peer_add(&sh.listed, 0, 1);
        if (at < FEW) peer_put(&sh.list[at], 0, order);
        else sh.full = 1;
    });
    cluster_sync(place.parts);
    if (place.tid == 0) sh.full = 0;
    return sh.listed <= FEW;
}
// A word for all blocks, by a thread of the first.
__device__ __forceinline__ void tell(const Place &place, u32 word, u64 value) {
    for (u32 part = 0; part < place.parts; part++) peer_put(&sh.answer[word], part, value);
}
// Waits for those. The first block forgets its list.
__device__ __forceinline__ void answered(const Place &place) {
    if (place.part == 0) {
        __syncthreads();
        if (place.tid == 0) sh.listed = 0;
    }
    cluster_sync(place.parts);
}

// A floor for a search, found with the threads' largest orders only: if these reach the limit at a
// digit, so does the whole, there or above.
__device__ __forceinline__ u64 floor_of(Place &place, u64 largest, u32 amount, u64 limit) {
    clear(place);
    if (largest != 0) add((u32)(largest >> 56), amount);
    u32 digit = pick(place, 0, limit);
    return digit == NONE ? 1 : max((u64)digit << 56, (u64)1);
}

// Finds where the sum of amounts, from the largest order down, reaches the limit; if it does so at
// all, at `floor` or above. One digit after another, until few tokens are left.
template <class By>
__device__ __forceinline__ Cut
search(Place &place, const u32 *tokens, const By &by, u64 largest, u64 limit, u64 floor) {
    Range range = {floor, 0, 64};
    u64 before = 0;
    for (;;) {
        clear(place);
        if (largest >= range.floor) place.each(tokens, by.least(range.highest()), [&](u32 value, u32 id) {
            u64 order = by.order(value, id);
            if (range.has(order)) add(range.digit(order), By::amount(order));
        });
        u32 digit = pick(place, before, limit);
        if (digit == NONE) return Cut{0, NONE, 0};
        range.enter(digit);
        // The sum over this digit tells how many there are at least.
        u64 sum = sh.sums[255 - digit];
        before = sh.before;
        if (sum > (u64)FEW * By::amount(range.last())) continue;
        bool listed = bring(place, tokens, by, largest, range);
        if (place.part == 0) {
            u64 order = listed && place.tid < sh.listed ? sh.list[place.tid] : 0;
            u64 sum = before + (order != 0 ? earlier<By>(sh.listed, order) : 0), amount = By::amount(order);
            if (order != 0 && sum < limit && limit <= sum + amount) {
                tell(place, 0, order);
                tell(place, 1, sum + amount);
            }
            if (!listed && place.tid == 0) tell(place, 0, 0);
        }
        answered(place);
        u64 order = sh.answer[0];
        if (order != 0) return Cut{By::value(order), By::id(order), sh.answer[1]};
    }
}

// The weight at which top-p stops: `SamplerParams::nucleus`.
__device__ __forceinline__ u64 nucleus(u32 top_p, u64 total) {
    u64 share = min(top_p, ONE);
    // total * share / 2^30, rounded up.
    u64 low = total * share, high = __umul64hi(total, share);
    u64 limit = high << 34 | low >> 30;
    limit += (low & (ONE - 1)) != 0;
    return max(limit, (u64)1);
}

// A short top-k and the top-p after it at once, by the first block. False if too many tokens come
// close to the k-th.
__device__ __forceinline__ bool
shortlist(Place &place, const u32 *tokens, const ByLogit &by, u64 largest, const Params &params, u64 floor, Cut &by_logit, Cut &by_weight) {
    bool listed = bring(place, tokens, by, largest, Range{floor, 0, 64});
    if (place.part == 0) {
        u32 n = listed ? sh.listed : 0, k = min(params.top_k, n);
        u64 order = place.tid < n ? sh.list[place.tid] : 0;
        u64 rank = order != 0 ? earlier<ByLogit>(n, order) : 0;
        bool stays = order != 0 && rank < k;
        u32 w = stays ? weight(by.scale(ByLogit::value(order))) : 0;
        if (stays && rank == k - 1) tell(place, 0, order);
        u64 sum = warp_sum((u64)w), total = 0;
        if (place.lane == 0) sh.warp[place.warp] = sum;
        __syncthreads();
        for (u32 i = 0; i < FEW / 32; i++) total += sh.warp[i];
        const u64 limit = nucleus(params.top_p, total);
        order = stays ? ByWeight{0}.order(w, ByLogit::id(order)) : 0;
        if (place.tid < n) sh.list[place.tid] = order;
        __syncthreads();
        sum = order != 0 ? earlier<ByWeight>(n, order) : 0;
        if (order != 0 && sum < limit && limit <= sum + w) {
            tell(place, 1, order);
            tell(place, 2, sum + w);
        }
        if (n == 0 && place.tid == 0) tell(place, 1, 0);
    }
    answered(place);
    u64 order = sh.answer[0], heavy = sh.answer[1];
    if (heavy == 0) return false;
    by_logit = Cut{ByLogit::value(order), ByLogit::id(order), 0};
    by_weight = Cut{ByWeight::value(heavy), ByWeight::id(heavy), sh.answer[2]};
    return true;
}

// What makes one row's distribution: `Row` of the definition.
struct Inputs {
    const float *raw;
    const u32 *counts, *drafts, *mask;
    const uint2 *biases;
    u32 draft_count, bias_count;

    __device__ __forceinline__ bool allows(u32 token) const {
        return mask == nullptr || mask[token / 32] >> token % 32 & 1;
    }
    // Proposals that are this token; the first of them in `at`.
    __device__ u32 drafted(u32 token, u32 &at) const {
        u32 count = 0;
        for (u32 e = draft_count; e-- > 0;)
            if (drafts[e] == token) at = e, count++;
        return count;
    }
};

// Proposals and biases, which touch few tokens. What several touch is done by the first's thread.
__device__ __noinline__ void adjust(u32 *tokens, u32 first, u32 end, Inputs in, Penalty penalty) {
    // All threads of the block work on all of its tokens.
    if (penalty.any() && threadIdx.x < in.draft_count) {
        u32 token = in.drafts[threadIdx.x], at = 0;
        u32 count = in.drafted(token, at);
        if (token >= first && token < end && at == threadIdx.x && in.allows(token)) {
            u32 all = count_output(in.counts[token], count);
            tokens[token - first] = ordered(penalty(clean(in.raw[token]), all));
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < in.bias_count; i += THREADS) {
        u32 token = in.biases[i].x;
        if (token < first || token >= end || !in.allows(token)) continue;
        bool repeated = false;
        for (u32 j = 0; j < i; j++) repeated |= in.biases[j].x == token;
        if (repeated) continue;
        float z = unordered(tokens[token - first]);
        for (u32 j = i; j < in.bias_count; j++)
            if (in.biases[j].x == token) z = clean(__fadd_rn(z, __uint_as_float(in.biases[j].y)));
        tokens[token - first] = ordered(z);
    }
    __syncthreads();
}

// The sum of the weights at temperature 1 of this thread's raw logits.
__device__ __noinline__ u64 raw_weight(const Place &place, const float *raw, float max) {
    u64 sum = 0;
#pragma unroll 8
    for (u32 j = place.lane; j < place.count; j += 32)
        sum += weight(__fsub_rn(clean(raw[place.first + j]), max));
    return sum;
}

// The winner among this thread's tokens.
__device__ __forceinline__ u64 race(const Place &place, const u32 *tokens, const Params &params, u32 position) {
    u64 best = NO_ENTRY;
    // A warp looks at two groups of 64 tokens at a time; 16 threads have the numbers of a group.
    for (u32 group = 0; group < place.count; group += 128) {
        u32 at = group + place.lane / 16 * 64 + place.lane % 16;
        u32 w[4], any = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) any |= w[i] = at + 16 * i < place.count ? tokens[at + 16 * i] : 0;
        if (any == 0) continue;
        u32 token = place.first + at;
        uint4 words = philox(token / 64 * 16 + token % 16, position, FOR_RACE, params.seed);
        u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (w[i] != 0) best = min(best, race_entry(word[i], w[i], token + 16 * i));
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) accept_rows(
    const float *logits, const u32 *ids, const Params *all_params, const u32 *counts, const uint2 *biases,
    const u32 *masks, const LaneStep *steps, u8 *scratch, u32 row_bytes, u32 stride, u32 valid,
    u32 bias_capacity, u32 max_rows, u32 last, u32 span) {
    launch_next();
    Place place;
    place.part = blockIdx.x, place.parts = gridDim.x, place.phase = 0;
    place.tid = threadIdx.x, place.warp = place.tid / 32, place.lane = place.tid % 32;
    if (place.tid == 0) sh.listed = sh.full = 0;
    // Before others write into this block's memory it must be there.
    cluster_sync(place.parts);
    wait();
    u32 per_lane = last ? 1 : max_rows, lane = blockIdx.y / per_lane, i = blockIdx.y % per_lane;
    const LaneStep step = steps[lane];
    const Judged judged(step, lane, last);
    if (i >= judged.rows) return;
    const u32 row_index = judged.first + i;
    Row *row = row_of(scratch, row_index, row_bytes);
    const u32 block_first = place.part * WARPS * span;
    place.first = block_first + place.warp * span;
    place.count = place.first < valid ? min(span, valid - place.first) : 0;
    u32 *const block_tokens = NEAR ? near_tokens : row->tokens() + block_first;
    u32 *const tokens = block_tokens + place.warp * span;
    // The logits are under way before the parameters are known.
    Inputs in;
    in.raw = logits + (u64)row_index * stride;
    Quads<float, float4, BATCH> z(in.raw + place.first, 4 * place.lane, place.count);

    const Params params = all_params[step.slot];
    in.counts = counts + (u64)step.slot * valid;
    in.drafts = ids + step.row0 + 1, in.draft_count = last ? 0 : i;
    in.biases = biases + (u64)step.slot * bias_capacity;
    in.bias_count = min(params.biases, bias_capacity);
    in.mask = params.flags & MASKED && masks != nullptr ? masks + (u64)row_index * ((valid + 31) / 32) : nullptr;
    const bool greedy = params.rule == GREEDY || params.rule > INVARIANT;
    const Penalty penalty = {params.presence, params.frequency, params.repetition};
    const bool penalties = penalty.any();
    const bool adjusted = (penalties && in.draft_count > 0) || in.bias_count > 0;

    // The largest processed logit, the first of equals, and the largest raw one.
    u32 best = 0, best_at = 0, best_raw = 0;
    for (u32 at = 4 * place.lane; at < place.count; at += BATCH * 128) {
        if (at >= BATCH * 128) z = Quads<float, float4, BATCH>(in.raw + place.first, at, place.count);
#pragma unroll
        for (u32 half = 0; half < BATCH; half += BATCH / 2) {
            Quads<u32, uint4, BATCH / 2> counted;
            if (penalties) counted = Quads<u32, uint4, BATCH / 2>(in.counts + place.first, at + 128 * half, place.count);
#pragma unroll
            for (u32 u = 0; u < BATCH / 2; u++) {
                u32 j = at + 128 * (half + u);
                if (j >= place.count) break;
                float4 v = z.v[half + u];
                float x[4] = {clean(v.x), clean(v.y), clean(v.z), clean(v.w)};
                u32 n[4] = {counted.v[u].x, counted.v[u].y, counted.v[u].z, counted.v[u].w};
                // Spans begin with a mask's word.
                u32 allowed = in.mask == nullptr ? 15 : in.mask[(place.first + j) / 32] >> j % 32;
                u32 keys[4];
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    best_raw = max(best_raw, j + c < place.count ? ordered(x[c]) : 0);
                    if (penalties) x[c] = penalty(x[c], n[c]);
                    keys[c] = ordered(allowed >> c & 1 ? x[c] : NEG_INF);
                    if (j + c >= place.count) keys[c] = 0;
                    if (keys[c] > best) best = keys[c], best_at = j + c;
                }
                if (!greedy || adjusted) *(uint4 *)(tokens + j) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
            }
        }
    }
    if (adjusted) {
        __syncthreads();
        adjust(block_tokens, block_first, min(block_first + WARPS * span, valid), in, penalty);
        best = 0;
        place.each(tokens, 1, [&](u32 key, u32 id) {
            if (key > best) best = key, best_at = id - place.first;
        });
    }
    const u64 winner = place.all<MOST>((u64)best << 32 | ~(place.first + best_at));
    u32 pick = ~(u32)winner;
    const float most = unordered((u32)(winner >> 32));
    float log_sum = 0.0f;
    if (params.flags & LOGPROBS) {
        const float max = unordered((u32)place.all<MOST>(best_raw));
        log_sum = max;
        if (max > NEG_INF) {
            const u64 total = place.all<SUM>(raw_weight(place, in.raw, max));
            const float sum = __fmul_rn(__ull2float_rn(total), 1.0f / ONE);
            log_sum = __fadd_rn(max, natural_log(sum));
        }
    }
    const bool degenerate = most == NEG_INF;
    u64 total = ONE, span_sum = 0;
    if (degenerate) {
        u64 least = ~(u64)0;
        if (in.mask != nullptr)
            for (u32 j = place.lane; j < place.count; j += 32)
                if (in.allows(place.first + j)) least = min(least, (u64)place.first + j);
        least = place.all<LEAST>(least);
        pick = least == ~(u64)0 ? 0 : (u32)least;
        if (!greedy) {
            place.map(tokens, 0, [&](u32, u32 id) { return id == pick ? ONE : 0; });
            if (pick >= place.first && pick - place.first < place.count) span_sum = ONE;
        }
    } else if (!greedy) {
        const Scale scale = {most, params.inv_temperature, __fadd_rn(most, params.min_logit)};
        Cut by_logit = {0, NONE, 0}, by_weight = {0, NONE, 0};
        bool cut = false;
        if (params.top_k > 0 && params.top_k < valid) {
            const ByLogit by = {scale};
            const u64 largest = by.order(best, place.first + best_at);
            const u64 floor = floor_of(place, largest, 1, params.top_k);
            if (params.top_k <= FEW / 2) cut = shortlist(place, tokens, by, largest, params, floor, by_logit, by_weight);
            if (!cut) by_logit = search(place, tokens, by, largest, params.top_k, floor);
        }
        // Logits to weights. A span may have none.
        u32 heaviest = 0, heaviest_id = 0;
        const u32 least = max(scale.least(), by_logit.value);
        const bool any = __any_sync(WARP_ALL, best >= least);
        if (any) place.map(tokens, least, [&](u32 key, u32 id) {
            u32 w = by_logit.keeps(key, id) ? weight(scale(key)) : 0;
            if (!by_weight.keeps(w, id)) w = 0;
            if (w > heaviest) heaviest = w, heaviest_id = id;
            span_sum += w;
            return w;
        });
        if (cut) {
            total = by_weight.total;
        } else {
            total = place.all<SUM>(span_sum);
            const u64 limit = nucleus(params.top_p, total);
            if (limit < total) {
                const ByWeight by = {(u32)((total - limit) / valid)};
                const u64 largest = by.order(heaviest, heaviest_id);
                const u64 floor = floor_of(place, largest, heaviest, limit);
                by_weight = search(place, tokens, by, largest, limit, floor);
                total = by_weight.total;
                span_sum = 0;
                if (any) place.map(tokens, max(by_weight.value, 1u), [&](u32 w, u32 id) {
                    w = by_weight.keeps(w, id) ? w : 0;
                    span_sum += w;
                    return w;
                });
            }
        }
        if (params.rule == INVARIANT) {
            __syncwarp();
            const u64 won = place.all<LEAST>(any ? race(place, tokens, params, judged.base + i + 1) : NO_ENTRY);
            pick = won == NO_ENTRY ? 0 : (u32)won;
        }
    }
    if (!greedy && params.rule != INVARIANT) {
        span_sum = warp_sum(span_sum);
        if (place.lane == 0) row->sums[place.part * WARPS + place.warp] = span_sum;
        if (NEAR && span_sum > 0)
            for (u32 j = 4 * place.lane; j < place.count; j += 128)
                *(uint4 *)(row->tokens() + place.first + j) = *(const uint4 *)(tokens + j);
    }
    if (place.part == 0 && place.tid == 0) {
        row->total = total;
        row->pick = pick;
        row->log_sum = log_sum;
        row->degenerate = degenerate;
    }
}


// ---- lanes ----

struct u128 {
    u64 high, low;
};
__device__ __forceinline__ u128 wide(u64 a, u64 b) {
    return u128{__umul64hi(a, b), a * b};
}
__device__ __forceinline__ u128 operator*(u128 a, u64 b) {
    return u128{a.high * b + __umul64hi(a.low, b), a.low * b};
}
__device__ __forceinline__ u128 operator+(u128 a, u128 b) {
    u64 low = a.low + b.low;
    return u128{a.high + b.high + (low < a.low), low};
}
__device__ __forceinline__ u128 operator-(u128 a, u128 b) {
    return u128{a.high - b.high - (a.low < b.low), a.low - b.low};
}
__device__ __forceinline__ bool operator<(u128 a, u128 b) {
    return a.high < b.high || (a.high == b.high && a.low < b.low);
}
__device__ __forceinline__ u128 up32(u128 a) {
    return u128{a.high << 32 | a.low >> 32, a.low << 32};
}
__device__ __forceinline__ u128 down32(u128 a) {
    return u128{a.high >> 32, a.high << 32 | a.low >> 32};
}
__device__ __forceinline__ double approximate(u128 a) {
    return (double)a.high * 18446744073709551616.0 + (double)a.low;
}
// a / b, rounded down, from a number that is off by little.
__device__ __forceinline__ u64 exactly(u64 about, u128 a, u128 b) {
    while (a < b * about) about--;
    while (!(a < b * (about + 1))) about++;
    return about;
}
// a / b, known to be below 2^51: the approximation is off by one at most.
__device__ u64 quotient(u128 a, u128 b) {
    return exactly((u64)(approximate(a) / approximate(b)), a, b);
}
// 1 as a prefix weight.
#define UNIT ((u64)1 << 32)

// The rows of a lane and its proposals: proposal e, from 1, was judged by row e - 1 and lies at e.
struct Lane {
    u32 proposed, tokens[MAX_ROWS + 1], picks[MAX_ROWS];
    // Total of a row's weights, and of a proposal's candidates.
    u64 totals[MAX_ROWS], q_totals[MAX_ROWS + 1];
    // Candidates, their weights by the drafter, and by the target's row.
    u32 counts[MAX_ROWS + 1], ids[MAX_ROWS + 1][MAX_K], q[MAX_ROWS + 1][MAX_K], p[MAX_ROWS + 1][MAX_K];
    // The same of the proposed token.
    u32 own_q[MAX_ROWS + 1], own_p[MAX_ROWS + 1];
    // Prefix weights.
    u64 w[MAX_ROWS + 1];
    u32 accepted, token, holder, kept, flags, out[MAX_ROWS], degenerate[MAX_ROWS];
    float log_sums[MAX_ROWS];
    bool searched, residual;
    u64 at;
    u128 excess[MAX_K];
    u64 sums[MAX_PARTS * WARPS];
    u64 warp[8];
};
#define LANE_THREADS 256

// Token's weight in a row.
__device__ __forceinline__ u32 weight_of(Row *row, u32 token, u32 valid, u32 span) {
    return token < valid && row->sums[token / span] > 0 ? row->tokens()[token] : 0;
}

// max(w p - q, 0) of candidate c of proposal e, in units of 1 / (2^32 Sp Sq).
__device__ __forceinline__ u128 excess(const Lane &s, u32 e, u64 w, u32 c) {
    u128 p = wide(w * s.p[e][c], s.q_totals[e]);
    u128 q = up32(wide(s.q[e][c], s.totals[e - 1]));
    return q < p ? p - q : u128{0, 0};
}
// The sum of that over all tokens. By one warp.
__device__ u128 residual_mass(const Lane &s, u32 e, u64 w) {
    u32 c = threadIdx.x % 32;
    u128 mass = c < s.counts[e] ? excess(s, e, w, c) : u128{0, 0};
    u64 listed = warp_sum((u64)(c < s.counts[e] ? s.p[e][c] : 0));
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        u128 other = {__shfl_xor_sync(WARP_ALL, mass.high, d), __shfl_xor_sync(WARP_ALL, mass.low, d)};
        mass = mass + other;
    }
    return mass + wide(w, s.totals[e - 1] - listed) * s.q_totals[e];
}

// How many of the first proposals stand. By one warp; proposal e is thread e - 1's.
__device__ u32 leading(bool stands, u32 proposed) {
    u32 fallen = __ballot_sync(WARP_ALL, !stands || threadIdx.x % 32 >= proposed);
    return fallen == 0 ? 32 : __ffs(fallen) - 1;
}

__device__ void apply_token_rule(Lane &s, const Params &params, u32 base) {
    if (threadIdx.x >= 32) return;
    u32 e = threadIdx.x + 1;
    bool stands = false;
    if (e <= s.proposed) {
        u128 q = wide((u64)uniform(params, base, FOR_ACCEPT, e) * s.own_q[e], s.totals[e - 1]);
        u128 p = up32(wide(s.own_p[e], s.q_totals[e]));
        stands = q < p;
    }
    u32 accepted = leading(stands, s.proposed);
    if (threadIdx.x == 0) s.accepted = accepted, s.w[accepted] = UNIT;
}

__device__ void apply_block_rule(Lane &s, const Params &params, u32 base) {
    if (threadIdx.x < 32) {
        // w[e] = min(1, w[e - 1] p / q), rounded down: about the ratio, and then exactly.
        u32 own = threadIdx.x + 1;
        double ratio = 0;
        if (own <= s.proposed)
            ratio = approximate(wide(s.own_p[own], s.q_totals[own])) / approximate(wide(s.own_q[own], s.totals[own - 1]));
        u64 w = UNIT;
        for (u32 e = 1; e <= s.proposed; e++) {
            u128 p = wide(w * s.own_p[e], s.q_totals[e]), q = wide(s.own_q[e], s.totals[e - 1]);
            double about = (double)w * __shfl_sync(WARP_ALL, ratio, e - 1);
            bool none = q.high == 0 && q.low == 0;
            w = none ? 0 : about > 2.0 * UNIT ? UNIT : min(exactly((u64)about, p, q), UNIT);
            if (threadIdx.x == 0) s.w[e] = w;
        }
        if (threadIdx.x == 0) s.accepted = 0;
    }
    __syncthreads();
    for (u32 e = threadIdx.x / 32 + 1; e <= s.proposed; e += LANE_THREADS / 32) {
        u64 u = uniform(params, base, FOR_ACCEPT, e), w = s.w[e];
        bool stands = u < w;
        if (e < s.proposed) {
            u128 rest = residual_mass(s, e + 1, w);
            u128 lost = wide(UNIT - w, s.totals[e]) * s.q_totals[e + 1];
            // Both lose 32 bits, of 92 or more that a certain outcome has.
            u128 all = down32(rest + lost);
            rest = down32(rest);
            stands = (all.high == 0 && all.low == 0) || all * u < up32(rest);
        }
        if (threadIdx.x % 32 == 0 && stands) atomicMax(&s.accepted, e);
    }
}

// The thread in whose part of a running sum unit `at` lies; `at` becomes the unit in that part. NOBODY
// if it lies behind all of them; `at` loses their sum.
#define NOBODY LANE_THREADS
__device__ u32 holder(Lane &s, u64 part, u64 &at) {
    u32 tid = threadIdx.x;
    u64 until = warp_scan(part), all = 0;
    if (tid % 32 == 31) s.warp[tid / 32] = until;
    if (tid == 0) s.holder = NOBODY;
    __syncthreads();
    for (u32 i = 0; i < LANE_THREADS / 32; i++) {
        if (i == tid / 32) until += all;
        all += s.warp[i];
    }
    if (until - part <= at && at < until) {
        s.holder = tid;
        s.at = at - (until - part);
    }
    __syncthreads();
    u32 holder = s.holder;
    at = holder == NOBODY ? at - all : s.at;
    __syncthreads();
    return holder;
}

// The token that holds unit s.at of a row's weights, by ascending id.
__device__ void find(Lane &s, Row *row, u32 valid, u32 span) {
    u32 tid = threadIdx.x;
    u64 at = s.at;
    u32 found = holder(s, s.sums[tid], at);
    u32 end = found == NOBODY ? 0 : min((found + 1) * span, valid);
    for (u32 from = found * span; from < end; from += 4 * LANE_THREADS) {
        u32 own[4], first = from + 4 * tid;
        u64 sum = 0;
#pragma unroll
        for (u32 c = 0; c < 4; c++) sum += own[c] = first + c < end ? row->tokens()[first + c] : 0;
        u32 there = holder(s, sum, at);
        if (there == NOBODY) continue;
        if (there == tid) {
            u32 c = 0;
#pragma unroll
            for (u32 i = 0; i < 3; i++) {
                if (c == i && at >= own[i]) at -= own[i], c++;
            }
            s.token = first + c;
        }
        break;
    }
    __syncthreads();
}

// The token behind the accepted ones: drawn from max(w p - q, 0), the proposal's candidates in
// their order, then all others by ascending id; from p where there is none of that or no proposal.
__device__ void draw(Lane &s, const Params &params, u32 base, Row *row, u32 valid, u32 span) {
    u32 tid = threadIdx.x, accepted = s.accepted, e = accepted + 1;
    bool proposal = e <= s.proposed;
    u64 w = s.w[accepted];
    s.sums[tid] = tid * (u64)span < valid ? row->sums[tid] : 0;
    if (tid < 32) {
        u128 mass = {0, 0};
        if (proposal) {
            mass = residual_mass(s, e, w);
            if (tid < s.counts[e]) s.excess[tid] = excess(s, e, w, tid);
            __syncwarp();
        }
        if (tid == 0) {
            u64 u = uniform(params, base, FOR_TARGET, accepted);
            s.residual = mass.high != 0 || mass.low != 0;
            s.searched = true;
            s.token = 0;
            if (!s.residual) {
                s.at = below(s.totals[accepted], (u32)u);
            } else {
                u128 at = down32(mass) * u + down32(wide(mass.low & (UNIT - 1), u));
                for (u32 c = 0; c < s.counts[e] && s.searched; c++) {
                    if (at < s.excess[c]) s.token = s.ids[e][c], s.searched = false;
                    else at = at - s.excess[c];
                }
                if (s.searched) s.at = quotient(at, wide(w, s.q_totals[e]));
            }
        }
    }
    __syncthreads();
    if (!s.searched) return;
    if (s.residual && tid < s.counts[e] && s.p[e][tid] > 0) {
        // The candidates are taken out.
        u32 id = s.ids[e][tid];
        atomicAdd(&s.sums[id / span], -(u64)s.p[e][tid]);
        row->tokens()[id] = 0;
    }
    __syncthreads();
    find(s, row, valid, span);
}

// Reads the rows and proposals of a lane.
__device__ void read_lane(
    Lane &s, const u32 *ids, u32 *proposals, u8 *scratch, const Judged &judged, u32 row0, u32 row_bytes,
    u32 valid, u32 max_rows, u32 k, u32 span, bool sampled) {
    u32 tid = threadIdx.x, c = tid % 32;
    if (tid < judged.rows) {
        const Row *row = row_of(scratch, judged.first + tid, row_bytes);
        s.tokens[tid] = ids[row0 + tid];
        s.picks[tid] = row->pick;
        s.totals[tid] = row->total;
        s.log_sums[tid] = row->log_sum;
        s.degenerate[tid] = row->degenerate;
    }
    if (tid == 0) s.proposed = judged.rows - 1, s.w[0] = UNIT;
    // A warp for every proposal, a thread for every candidate.
    for (u32 e = tid / 32 + 1; sampled && e < judged.rows; e += LANE_THREADS / 32) {
        Drawn drawn(proposals, gridDim.x * (max_rows - 1), blockIdx.x * (max_rows - 1) + e - 1, k);
        Row *row = row_of(scratch, judged.first + e - 1, row_bytes);
        u32 token = ids[row0 + e], count = proposals == nullptr ? 0 : min(*drawn.count, k);
        u32 id = token, q = c == 0 ? ONE : 0, p = 0;
        if (count > 0 && c < count) id = drawn.ids[c], q = drawn.weights[c];
        else if (count > 0) q = 0;
        // One that was not drawn has itself as its only candidate.
        count = max(count, 1);
        if (c < count) p = weight_of(row, id, valid, span);
        u32 own_p = weight_of(row, token, valid, span);
        u32 here = __ballot_sync(WARP_ALL, c < count && id == token);
        u32 own_q = __shfl_sync(WARP_ALL, q, here == 0 ? 0 : __ffs(here) - 1);
        u64 q_total = warp_sum((u64)q);
        s.ids[e][c] = id, s.q[e][c] = q, s.p[e][c] = p;
        if (c == 0) {
            s.counts[e] = count;
            s.q_totals[e] = q_total;
            s.own_q[e] = here == 0 ? 0 : own_q;
            s.own_p[e] = own_p;
        }
    }
    __syncthreads();
}

#define STOPPED 1u
#define LIMIT 2u
#define DEGENERATE 4u

// Cuts the tokens behind the first stop id and before the end. By one warp.
__device__ void truncate(Lane &s, const Params &params, u32 base) {
    u32 i = threadIdx.x, accepted = s.accepted;
    u32 token = i < accepted ? s.tokens[i + 1] : s.token;
    u32 next = base == ~0u ? base : base + 1, room = params.end > next ? params.end - next : 0;
    u32 kept = min(accepted + 1, room), flags = kept == room ? LIMIT : 0;
    bool stop = false;
    for (u32 j = 0; j < min(params.stops, 8u); j++) stop |= params.stop[j] == token;
    u32 stops = __ballot_sync(WARP_ALL, stop && i < kept);
    if (stops != 0) kept = __ffs(stops), flags = STOPPED;
    bool broken = i < max(kept, 1u) && s.degenerate[i];
    if (__any_sync(WARP_ALL, broken)) flags |= DEGENERATE;
    s.out[i] = token;
    if (i == 0) s.kept = kept, s.flags = flags;
}

extern "C" __global__ void __launch_bounds__(LANE_THREADS) accept_lanes(
    const float *logits, u32 *ids, u32 *draft_ids, u32 *proposals, const Params *all_params, u32 *counts,
    LaneStep *steps, u32 *results, u8 *scratch, u32 row_bytes, u32 stride, u32 valid, u32 max_rows, u32 k,
    u32 last, u32 span) {
    __shared__ Lane s;
    launch_next();
    wait();
    u32 tid = threadIdx.x, lane = blockIdx.x;
    LaneStep step = steps[lane];
    const Params params = all_params[step.slot];
    const Judged judged(step, lane, last);
    const bool sampled = params.rule == BY_TOKEN || params.rule == BY_BLOCK;
    if (tid == 0) s.kept = s.flags = 0;
    if (judged.rows > 0) {
        read_lane(s, ids, proposals, scratch, judged, step.row0, row_bytes, valid, max_rows, k, span, sampled);
        if (sampled) {
            if (params.rule == BY_TOKEN) apply_token_rule(s, params, judged.base);
            else apply_block_rule(s, params, judged.base);
            __syncthreads();
            Row *row = row_of(scratch, judged.first + s.accepted, row_bytes);
            draw(s, params, judged.base, row, valid, span);
        } else if (tid < 32) {
            u32 accepted = leading(tid < s.proposed && s.tokens[tid + 1] == s.picks[tid], s.proposed);
            if (tid == 0) s.accepted = accepted, s.token = s.picks[accepted];
        }
        __syncthreads();
        if (tid < 32) truncate(s, params, judged.base);
    }
    __syncthreads();
    const u32 kept = s.kept, flags = s.flags;
    if (tid < kept && s.out[tid] < valid) {
        u32 before = 0, same = 0, token = s.out[tid];
        for (u32 i = 0; i < kept; i++) same += s.out[i] == token, before += i < tid && s.out[i] == token;
        u32 *count = counts + (u64)step.slot * valid + token;
        if (before == 0) *count = count_output(*count, same);
    }
    const u32 words = 4 + 3 * max_rows;
    for (u32 j = tid; j < words; j += LANE_THREADS) {
        u32 part = j < 4 ? 0 : (j - 4) / max_rows, i = j < 4 ? 0 : (j - 4) % max_rows, word = 0;
        if (j < 3) {
            word = j == 0 ? kept : j == 2 ? flags : judged.rows > 0 ? judged.rows - 1 : 0;
        } else if (j > 3 && i < kept) {
            float log_sum = s.log_sums[i];
            if (part == 0) {
                word = s.out[i];
            } else if (params.flags & LOGPROBS && part == 2) {
                word = __float_as_uint(log_sum);
            } else if (params.flags & LOGPROBS && s.out[i] < valid) {
                float raw = clean(logits[(u64)(judged.first + i) * stride + s.out[i]]);
                word = __float_as_uint(raw == NEG_INF ? raw : __fsub_rn(raw, log_sum));
            }
        }
        results[(u64)lane * words + j] = word;
    }
    if (tid == 0) {
        if (kept > 0) {
            ids[step.row0] = s.out[kept - 1];
            if (draft_ids != nullptr) draft_ids[step.row0] = s.out[kept - 1];
        }
        step.pos += last ? step.rows : kept;
        step.pending = last ? 0 : kept;
        step.parity ^= 1;
        if (flags & (STOPPED | LIMIT)) step.rows = 0;
        steps[lane] = step;
    }
}
