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

struct Shared {
    u64 warp[WARPS], exchange[2][MAX_PARTS];
    // 256 sums of 64 bits, or the low and the high halves.
    u64 histogram[256];
    u64 list[FEW];
    u64 before, answer[2];
    u32 listed, digit;
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

// A thread's place: it works on `count` tokens from `first` on, shared with its warp.
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
        if (warp == 0) {
            x = warp_all<KIND>(lane < WARPS ? sh.warp[lane] : none);
            if (lane < parts) peer_put(&sh.exchange[phase][part], lane, x);
        }
        // Two phases are enough: who writes one for the second time has met all who read it.
        cluster_sync(parts);
        return warp_all<KIND>(lane < parts ? sh.exchange[phase][lane] : none);
    }
};

// From a processed logit to its weight.
struct Scale {
    float max, inv_temperature, floor;
    // Above the likeliest, scaled; less than LIGHTEST if it can't weigh anything.
    __device__ __forceinline__ float operator()(u32 key) const {
        float z = unordered(key);
        float x = __fmul_rn(__fsub_rn(z, max), inv_temperature);
        return key != 0 && z >= floor && x >= LIGHTEST ? x : NEG_INF;
    }
};

// A token that a search looks at: the larger the order, the earlier it stays. 0 for tokens that are
// out of the question.
struct Entry {
    u64 order;
    u32 amount, digit;
};
// The k largest logits.
struct ByLogit {
    Scale scale;
    __device__ __forceinline__ Entry operator()(u32 key, u32 id) const {
        float x = scale(key);
        if (x == NEG_INF) return Entry{0, 0, 0};
        // Spreads all that weigh anything over the digits.
        u32 below = min((u32)__fmul_rn(-x, 11.875f), 255u);
        return Entry{(u64)key << 32 | ~id, 1, 255 - below};
    }
    static __device__ __forceinline__ u64 amount(u64) { return 1; }
};
// The heaviest, up to a limit of their sum; lighter ones than `light` never reach it.
struct ByWeight {
    u32 light;
    __device__ __forceinline__ Entry operator()(u32 weight, u32 id) const {
        if (weight <= light) return Entry{0, 0, 0};
        // Eight digits for every power of 2.
        u32 digit = (__float_as_uint(__uint2float_rn(weight)) >> 20) - (127 << 3);
        return Entry{(u64)weight << 32 | ~id, weight, digit};
    }
    static __device__ __forceinline__ u64 amount(u64 order) { return order >> 32; }
};

// In which digit the search goes on: first one of the entries' own, then bytes of the order.
struct Digits {
    u32 depth, first;
    u64 prefix;
    __device__ __forceinline__ bool has(const Entry &e) const {
        return e.order != 0 &&
               (depth == 0 || (e.digit == first && (depth == 1 || e.order >> (72 - 8 * depth) == prefix)));
    }
    __device__ __forceinline__ u32 of(const Entry &e) const {
        return depth == 0 ? e.digit : (u32)(e.order >> (64 - 8 * depth)) & 255;
    }
    __device__ __forceinline__ void enter(u32 digit) {
        if (depth == 0) first = digit;
        else prefix = prefix << 8 | digit;
        depth++;
    }
};

struct Cut {
    // The least order that stays; 0 if all stay.
    u64 order;
    // Sum of the amounts of what stays.
    u64 total;
};

// Finds where the sum of amounts, from the largest order down, reaches the limit.
template <class Of>
__device__ __forceinline__ Cut search(Place &place, const u32 *tokens, Of of, u64 limit) {
    u32 tid = place.tid, *halves = (u32 *)sh.histogram;
    Digits digits = {0, 0, 0};
    u64 before = 0;
    for (;;) {
        if (tid < 256) sh.histogram[tid] = 0;
        if (tid == 0) sh.listed = 0, sh.digit = ~0u;
        __syncthreads();
        for (u32 j = place.lane; j < place.count; j += 32) {
            Entry e = of(tokens[j], place.first + j);
            if (!digits.has(e)) continue;
            u32 digit = digits.of(e);
            if (NEAR) {
                // Sums of halves fit: a part has less than 2^16 tokens.
                atomicAdd(&halves[digit], e.amount & 0xffff);
                if (e.amount >> 16) atomicAdd(&halves[256 + digit], e.amount >> 16);
            } else {
                atomicAdd(&sh.histogram[digit], (u64)e.amount);
            }
        }
        cluster_sync(place.parts);
        // The sums over all parts, the largest digit first.
        u64 sum = 0;
        if (tid < 256) {
#pragma unroll 4
            for (u32 i = 0; i < place.parts; i++) {
                u32 part = (place.part + i) % place.parts, at = 255 - tid;
                if (NEAR) sum += peer_get(&halves[at], part) + ((u64)peer_get(&halves[256 + at], part) << 16);
                else sum += peer_get(&sh.histogram[at], part);
            }
        }
        u64 until = warp_scan(sum);
        if (place.lane == 31) sh.warp[place.warp] = until;
        __syncthreads();
        until += before;
        for (u32 w = 0; w < place.warp; w++) until += sh.warp[w];
        if (tid < 256 && until - sum < limit && limit <= until) {
            sh.digit = 255 - tid;
            sh.before = until - sum;
        }
        __syncthreads();
        // Less than the limit in all.
        if (sh.digit == ~0u) return Cut{0, 0};
        digits.enter(sh.digit);
        before = sh.before;
        for (u32 j = place.lane; j < place.count; j += 32) {
            Entry e = of(tokens[j], place.first + j);
            if (!digits.has(e)) continue;
            u32 at = peer_add(&sh.listed, 0, 1);
            if (at < FEW) peer_put(&sh.list[at], 0, e.order);
        }
        cluster_sync(place.parts);
        if (place.part == 0) {
            u32 n = sh.listed;
            bool last = n > FEW && tid == 0;
            Cut cut = {0, 0};
            if (n <= FEW && tid < n) {
                cut.order = sh.list[tid];
                u64 sum = before, own = Of::amount(cut.order);
#pragma unroll 4
                for (u32 i = 0; i < n; i++) {
                    u64 other = sh.list[i];
                    if (other > cut.order) sum += Of::amount(other);
                }
                cut.total = sum + own;
                last = sum < limit && limit <= cut.total;
            }
            if (last) {
                for (u32 part = 0; part < place.parts; part++) {
                    peer_put(&sh.answer[0], part, cut.order);
                    peer_put(&sh.answer[1], part, cut.total);
                }
            }
        }
        cluster_sync(place.parts);
        if (sh.answer[0] != 0) return Cut{sh.answer[0], sh.answer[1]};
    }
}

// What makes one row's distribution: `Row` of the definition.
struct Inputs {
    const float *raw;
    const u32 *counts, *drafts, *mask;
    const uint2 *biases;
    u32 draft_count, bias_count, valid;

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
__device__ __noinline__ void adjust(u32 *tokens, u32 first, u32 end, const Inputs &in, const Params &params, bool penalties) {
    // All threads of the block work on all of its tokens.
    if (penalties && threadIdx.x < in.draft_count) {
        u32 token = in.drafts[threadIdx.x], at = 0;
        u32 count = in.drafted(token, at);
        if (token >= first && token < end && at == threadIdx.x && in.allows(token)) {
            u32 all = count_output(in.counts[token], count);
            tokens[token - first] = ordered(penalised(params, clean(in.raw[token]), all));
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

// A limit of a sum of weights: `SamplerParams::nucleus`.
__device__ __forceinline__ u64 nucleus(u32 top_p, u64 total) {
    u64 share = min(top_p, ONE);
    // total * share / 2^30, rounded up.
    u64 low = total * share, high = __umul64hi(total, share);
    u64 limit = high << 34 | low >> 30;
    limit += (low & (ONE - 1)) != 0;
    return max(limit, (u64)1);
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
    // Before others write into this block's memory it must be there.
    cluster_sync(place.parts);
    wait();
    u32 per_lane = last ? 1 : max_rows, lane = blockIdx.y / per_lane, i = blockIdx.y % per_lane;
    const LaneStep step = steps[lane];
    const Judged judged(step, lane, last);
    if (i >= judged.rows) return;
    const Params params = all_params[step.slot];
    const u32 row_index = judged.first + i;
    Row *row = row_of(scratch, row_index, row_bytes);
    Inputs in;
    in.raw = logits + (u64)row_index * stride;
    in.counts = counts + (u64)step.slot * valid;
    in.drafts = ids + step.row0 + 1, in.draft_count = last ? 0 : i;
    in.biases = biases + (u64)step.slot * bias_capacity;
    in.bias_count = min(params.biases, bias_capacity);
    in.mask = params.flags & MASKED && masks != nullptr ? masks + (u64)row_index * ((valid + 31) / 32) : nullptr;
    in.valid = valid;

    const u32 block_first = place.part * WARPS * span;
    place.first = block_first + place.warp * span;
    place.count = place.first < valid ? min(span, valid - place.first) : 0;
    u32 *const block_tokens = NEAR ? near_tokens : row->tokens() + block_first;
    u32 *const tokens = block_tokens + place.warp * span;
    const bool greedy = params.rule == GREEDY || params.rule > INVARIANT;
    const bool penalties = params.presence != 0.0f || params.frequency != 0.0f || params.repetition != 1.0f;
    const bool adjusted = (penalties && in.draft_count > 0) || in.bias_count > 0;
    const bool aligned = aligned16(in.raw), aligned_counts = aligned16(in.counts);

    // The largest processed logit, the first of equals, and the largest raw one.
    u32 best = 0, best_at = 0, best_raw = 0;
    for (u32 at = 4 * place.lane; at < place.count; at += 4 * 128) {
        float4 z[4];
        uint4 counted[4];
#pragma unroll
        for (u32 u = 0; u < 4; u++) {
            u32 j = at + 128 * u;
            z[u] = load4<float, float4>(in.raw + place.first, j, place.count, aligned, NEG_INF);
            if (penalties)
                counted[u] = load4<u32, uint4>(in.counts + place.first, j, place.count, aligned_counts, 0);
        }
#pragma unroll
        for (u32 u = 0; u < 4; u++) {
            u32 j = at + 128 * u;
            if (j >= place.count) break;
            float x[4] = {clean(z[u].x), clean(z[u].y), clean(z[u].z), clean(z[u].w)};
            u32 n[4] = {counted[u].x, counted[u].y, counted[u].z, counted[u].w};
            // Spans begin with a mask's word.
            u32 allowed = in.mask == nullptr ? 15 : in.mask[(place.first + j) / 32] >> j % 32;
            u32 keys[4];
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                best_raw = max(best_raw, ordered(x[c]));
                if (penalties) x[c] = penalised(params, x[c], n[c]);
                keys[c] = ordered(allowed >> c & 1 ? x[c] : NEG_INF);
                if (j + c >= place.count) keys[c] = 0;
                if (keys[c] > best) best = keys[c], best_at = j + c;
            }
            if (greedy && !adjusted) continue;
            if (NEAR || j + 4 <= place.count) {
                *(uint4 *)(tokens + j) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
            } else {
                for (u32 c = 0; j + c < place.count; c++) tokens[j + c] = keys[c];
            }
        }
    }
    if (adjusted) {
        __syncthreads();
        adjust(block_tokens, block_first, min(block_first + WARPS * span, valid), in, params, penalties);
        best = 0;
        for (u32 j = place.lane; j < place.count; j += 32)
            if (tokens[j] > best) best = tokens[j], best_at = j;
    } else {
        __syncwarp();
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
            for (u32 j = place.lane; j < place.count; j += 32) tokens[j] = place.first + j == pick ? ONE : 0;
            if (pick >= place.first && pick - place.first < place.count) span_sum = ONE;
        }
    } else if (!greedy) {
        const Scale scale = {most, params.inv_temperature, __fadd_rn(most, params.min_logit)};
        Cut cut = {0, 0};
        if (params.top_k > 0 && params.top_k < valid)
            cut = search(place, tokens, ByLogit{scale}, params.top_k);
        for (u32 j = place.lane; j < place.count; j += 32) {
            u32 key = tokens[j];
            float x = scale(key);
            u32 w = ((u64)key << 32 | ~(place.first + j)) >= cut.order ? weight(x) : 0;
            tokens[j] = w;
            span_sum += w;
        }
        total = place.all<SUM>(span_sum);
        const u64 limit = nucleus(params.top_p, total);
        if (limit < total) {
            const u32 light = (u32)((total - limit) / valid);
            cut = search(place, tokens, ByWeight{light}, limit);
            span_sum = 0;
            for (u32 j = place.lane; j < place.count; j += 32) {
                u32 w = tokens[j];
                if (((u64)w << 32 | ~(place.first + j)) < cut.order) w = 0;
                tokens[j] = w;
                span_sum += w;
            }
            total = cut.total;
        }
        if (params.rule == INVARIANT) {
            __syncwarp();
            const u64 won = place.all<LEAST>(race(place, tokens, params, judged.base + i + 1));
            pick = won == NO_ENTRY ? 0 : (u32)won;
        }
    }
    if (!greedy && params.rule != INVARIANT) {
        span_sum = warp_sum(span_sum);
        if (place.lane == 0) row->sums[place.part * WARPS + place.warp] = span_sum;
        if (NEAR && span_sum > 0)
            for (u32 j = place.lane; j < place.count; j += 32) row->tokens()[place.first + j] = tokens[j];
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
// a / b, known to be below 2^51: the approximation is off by one at most.
__device__ u64 quotient(u128 a, u128 b) {
    u64 q = (u64)(approximate(a) / approximate(b));
    while (a < b * q) q--;
    while (!(a < b * (q + 1))) q++;
    return q;
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
    if (threadIdx.x == 0) {
        s.w[0] = UNIT;
        s.accepted = 0;
        for (u32 e = 1; e <= s.proposed; e++) {
            u128 p = wide(s.w[e - 1] * s.own_p[e], s.q_totals[e]);
            u128 q = wide(s.own_q[e], s.totals[e - 1]);
            bool none = q.high == 0 && q.low == 0;
            s.w[e] = none ? 0 : p < up32(q) ? quotient(p, q) : UNIT;
        }
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
