// What proposing and accepting share: `sampling.rs` and `random.rs` with the same operations in the
// same order, so the same bits. Intrinsics that round, so that nothing is contracted.

#define ONE (1u << 30)
#define TOKEN_IN_PROMPT (1u << 31)
enum { GREEDY, BY_TOKEN, BY_BLOCK, INVARIANT };
enum { FOR_DRAFT = 1, FOR_ACCEPT, FOR_TARGET, FOR_RACE };

// `SamplerParams`.
struct Params {
    u32 seed[2], rule, flags;
    float inv_temperature, min_logit;
    u32 top_k, top_p;
    float presence, frequency, repetition;
    u32 biases, end, stops, stop[8], reserved[2];
};
#define LOGPROBS 1u
#define MASKED 2u

__device__ __forceinline__ float clean(float z) {
    z = z > NEG_INF ? z : NEG_INF;
    z = z < 3.40282347e+38f ? z : 3.40282347e+38f;
    return __fadd_rn(z, 0.0f);
}

// Below this the weight is 0; half a unit of 2^-30 lies at -21.49.
#define LIGHTEST -22.0f

// round(2^30 e^x) for x <= 0. NaN weighs nothing.
__device__ __forceinline__ u32 weight(float x) {
    x = fmaxf(x, LIGHTEST);
    // Adding 1.5 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    const float large = 12582912.0f;
    float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896340736f), large);
    float n = __fsub_rn(shifted, large);
    float r = __fmaf_rn(n, -0.6933594f, x);
    r = __fmaf_rn(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = __fmaf_rn(p, r, 1.0f / 720.0f);
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    // 2^n and 2^30 at once: nothing here is subnormal, so nothing rounds.
    u32 power = (__float_as_uint(shifted) + (127 + 30)) << 23;
    return __float2uint_rn(__fmul_rn(p, __uint_as_float(power)));
}

__device__ __forceinline__ u32 count_output(u32 count, u32 amount) {
    u32 outputs = count & ~TOKEN_IN_PROMPT;
    outputs = min(outputs + amount, ~TOKEN_IN_PROMPT);
    return (count & TOKEN_IN_PROMPT) | outputs;
}

struct Penalty {
    float presence, frequency, repetition;
    __device__ __forceinline__ bool any() const {
        return presence != 0.0f || frequency != 0.0f || repetition != 1.0f;
    }
    // A clean logit of a token with this count.
    __device__ __forceinline__ float operator()(float logit, u32 count) const {
        if (count == 0) return logit;
        float z = logit > 0.0f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
        u32 outputs = count & ~TOKEN_IN_PROMPT;
        float often = __fmul_rn(frequency, __uint2float_rn(outputs));
        if (outputs > 0) z = __fsub_rn(__fsub_rn(z, often), presence);
        return clean(z);
    }
};

// Philox4x32-10.
__device__ __forceinline__ uint4 philox(u32 index, u32 position, u32 purpose, const u32 *seed) {
    uint4 x = make_uint4(index, position, purpose, 0);
    u32 k0 = seed[0], k1 = seed[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 p = (u64)0xD2511F53u * x.x, q = (u64)0xCD9E8D57u * x.z;
        x = make_uint4((u32)(q >> 32) ^ x.y ^ k0, (u32)q, (u32)(p >> 32) ^ x.w ^ k1, (u32)p);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return x;
}
__device__ __forceinline__ u32 uniform(const Params &params, u32 position, u32 purpose, u32 index) {
    return philox(index, position, purpose, params.seed).x;
}

// A positive normal number as (1 + f) 2^e with 1 + f in [sqrt(1/2), sqrt(2)).
__device__ __forceinline__ float split(float x, i32 &e) {
    i32 bits = (i32)__float_as_uint(x);
    e = (bits - 0x3F3504F3) >> 23;
    return __fsub_rn(__uint_as_float((u32)(bits - (e << 23))), 1.0f);
}
// e ln 2 + sign ln(1 + f).
__device__ __forceinline__ float log_parts(float e, float f, float twice) {
    float q = __fdiv_rn(f, __fadd_rn(2.0f, f));
    float q2 = __fmul_rn(q, q);
    float p = 1.0f / 9.0f;
    p = __fmaf_rn(p, q2, 1.0f / 7.0f);
    p = __fmaf_rn(p, q2, 1.0f / 5.0f);
    p = __fmaf_rn(p, q2, 1.0f / 3.0f);
    p = __fmaf_rn(p, q2, 1.0f);
    return __fmaf_rn(e, 0.693147180559945309417f, __fmul_rn(__fmul_rn(twice, q), p));
}
__device__ __forceinline__ float natural_log(float x) {
    i32 e;
    float f = split(x, e);
    return log_parts((float)e, f, 2.0f);
}
__device__ __forceinline__ float exponential_of(u32 word) {
    const float unit = 2.3283064365386963e-10f;
    float v = __fmul_rn(__fadd_rn(__uint2float_rn(word), 0.5f), unit);
    i32 e;
    float f = split(__fmul_rn(__fadd_rn(__uint2float_rn(~word), 0.5f), unit), e);
    return log_parts((float)-e, e == 0 ? -v : f, -2.0f);
}
// The word of a token in its block of four.
__device__ __forceinline__ u32 word_of(uint4 words, u32 token) {
    u32 w = token / 16 % 4;
    return w == 0 ? words.x : w == 1 ? words.y : w == 2 ? words.z : words.w;
}
// What wins the race when it is smallest, ties to the lowest token.
__device__ __forceinline__ u64 race_entry(u32 word, u32 weight, u32 token) {
    float time = __fdiv_rn(exponential_of(word), __uint2float_rn(weight));
    return (u64)__float_as_uint(time) << 32 | token;
}
#define NO_ENTRY (~(u64)0)
__device__ __forceinline__ u64 race_entry_of(const u32 *seed, u32 position, u32 token, u32 weight) {
    uint4 words = philox(token / 64 * 16 + token % 16, position, FOR_RACE, seed);
    return race_entry(word_of(words, token), weight, token);
}

// floor(total u / 2^32).
__device__ __forceinline__ u64 below(u64 total, u32 u) {
    return __umul64hi(total, (u64)u << 32);
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(WARP_ALL, x, d);
    return x;
}
__device__ __forceinline__ u64 warp_min(u64 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = min(x, __shfl_xor_sync(WARP_ALL, x, d));
    return x;
}
// The sum over this and the lanes below.
__device__ __forceinline__ u64 warp_scan(u64 x) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u64 below = __shfl_up_sync(WARP_ALL, x, d);
        x += lane >= d ? below : 0;
    }
    return x;
}

// One proposal's part of `Proposals`, of `rows` proposals in all, at `index`.
struct Drawn {
    u32 *count, *ids, *weights;
    __device__ Drawn(u32 *base, u32 rows, u32 index, u32 k)
        : count(base + index), ids(base + rows + index * k), weights(base + rows + (rows + index) * k) {}
};
