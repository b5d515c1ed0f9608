// A head in a warp's registers, for norm and rotary embedding: lane l has the elements l + 32 j.
//
// DIM; PAIRS: rotary pairs; ADJACENT: whether pair i is (2i, 2i + 1) or (i, i + PAIRS). One order of operations, with
// no freedom for the compiler, so that all kernels give a head the same bits.

#define HEAD_OWN ((DIM + 31) / 32)

// Cosine and sine of pair i at a position.
__device__ __forceinline__ float2 turn_of(const float* inv_freq, u32 pos, u32 i) {
    float sine, cosine;
    sincosf(__fmul_rn((float)pos, inv_freq[i]), &sine, &cosine);
    return make_float2(cosine, sine);
}

struct Head {
    float x[HEAD_OWN];

    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) {
            u32 i = threadIdx.x % 32 + 32 * j;
            x[j] = DIM % 32 == 0 || i < DIM ? from[i] : 0.0f;
        }
    }

    __device__ __forceinline__ void norm(const float* weight, float eps) {
        if (!weight) return;
        Head w;
        w.load(weight);
        norm(w, eps);
    }
    __device__ __forceinline__ void norm(const Head& weight, float eps) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) squares = __fmaf_rn(x[j], x[j], squares);
        float scale = 1.0f / sqrtf(__fmaf_rn(warp_sum(squares), 1.0f / DIM, eps));
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) x[j] = __fmul_rn(__fmul_rn(x[j], scale), weight.x[j]);
    }

    // Element l + 32 j + distance of lane l, for constants j and distance; anything beyond the head.
    __device__ __forceinline__ float at(int j, int distance) const {
        int from = 32 * j + distance, q = (from + 1024) / 32 - 32, r = (from + 1024) % 32;
        float low = q >= 0 && q < HEAD_OWN ? x[q] : 0.0f;
        if (r == 0) return low;
        float high = q + 1 >= 0 && q + 1 < HEAD_OWN ? x[q + 1] : 0.0f;
        u32 lane = threadIdx.x % 32, source = (lane + r) % 32;
        low = __shfl_sync(WARP_ALL, low, source), high = __shfl_sync(WARP_ALL, high, source);
        return lane + r < 32 ? low : high;
    }

    // Turns the first 2 PAIRS elements by `turns[i]`.
    __device__ __forceinline__ void turn(const float2* turns) {
        Head was = *this;
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) {
            if (32 * j >= 2 * PAIRS) continue;
            u32 i = threadIdx.x % 32 + 32 * j;
            bool first = ADJACENT ? i % 2 == 0 : (int)i < PAIRS;
            float after = was.at(j, ADJACENT ? 1 : PAIRS), before = was.at(j, ADJACENT ? -1 : -PAIRS);
            if ((int)i >= 2 * PAIRS) continue;
            float2 by = turns[ADJACENT ? i / 2 : first ? i : i - PAIRS];
            float other = first ? -after : before;
            x[j] = __fmaf_rn(other, by.y, __fmul_rn(was.x[j], by.x));
        }
    }

    // The word of elements l + 32 j and l + 32 j + 1 as brain floats, for even lanes l.
    __device__ __forceinline__ u32 word(int j) const {
        return pack_bf16(x[j], __shfl_xor_sync(WARP_ALL, x[j], 1));
    }

    // As a key of a page's block: see `KvPool` in step.rs.
    __device__ __forceinline__ void store_key(u32* block, u32 slot) const {
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) {
            u32 i = threadIdx.x % 32 + 32 * j, w = word(j);
            if (i % 2 == 0 && (DIM % 32 == 0 || i < DIM)) block[i / 2 * PAGE_TOKENS + slot] = w;
        }
    }
    __device__ __forceinline__ void store_value(u32* block, u32 slot) const {
#pragma unroll
        for (int j = 0; j < HEAD_OWN; j++) {
            u32 i = threadIdx.x % 32 + 32 * j, w = word(j);
            if (i % 2 == 0 && (DIM % 32 == 0 || i < DIM)) block[slot * (DIM / 2) + i / 2] = w;
        }
    }
};
