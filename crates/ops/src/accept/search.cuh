// Min-p, top-k and top-p of a row whose parts lie in a cluster of blocks, in their shared memory (NEAR)
// or in scratch.

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
#pragma unroll 2
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
        u32 part = place.tid & (place.parts - 1);
        u32 digit = place.part * (256 / place.parts) + place.tid / place.parts;
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
__device__ __forceinline__ bool
bring(const Place &place, const u32 *tokens, const By &by, u64 largest, const Range &range) {
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
shortlist(Place &place, const u32 *tokens, const ByLogit &by, u64 largest, const Params &params, u64 floor,
          Cut &by_logit, Cut &by_weight) {
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
