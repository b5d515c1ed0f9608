// Every lane: the rule on integers, the tokens, the next step.

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
            ratio = approximate(wide(s.own_p[own], s.q_totals[own])) /
                    approximate(wide(s.own_q[own], s.totals[own - 1]));
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
        read_lane(
            s, ids, proposals, scratch, judged, step.row0, row_bytes, valid, max_rows, k, span, sampled);
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
        for (u32 i = 0; i < kept; i++) {
            same += s.out[i] == token;
            before += i < tid && s.out[i] == token;
        }
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
