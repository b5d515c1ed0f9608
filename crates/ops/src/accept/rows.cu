// Every row on its own: logits become weights, in place.

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
__device__ __forceinline__ u64
race(const Place &place, const u32 *tokens, const Params &params, u32 position) {
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
    const bool masked = params.flags & MASKED && masks != nullptr;
    in.mask = masked ? masks + (u64)row_index * ((valid + 31) / 32) : nullptr;
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
            const u32 from = at + 128 * half;
            if (penalties) counted = Quads<u32, uint4, BATCH / 2>(in.counts + place.first, from, place.count);
#pragma unroll
            for (u32 u = 0; u < BATCH / 2; u++) {
                u32 j = from + 128 * u;
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
                if (greedy && !adjusted) continue;
                *(uint4 *)(tokens + j) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
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
            if (params.top_k <= FEW / 2)
                cut = shortlist(place, tokens, by, largest, params, floor, by_logit, by_weight);
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
            const u64 own = any ? race(place, tokens, params, judged.base + i + 1) : NO_ENTRY;
            const u64 won = place.all<LEAST>(own);
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
