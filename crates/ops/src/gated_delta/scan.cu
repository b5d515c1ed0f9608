// The rule row by row. A block has a tile of TILE columns of one head's state, in registers: a warp 8 of
// the columns, lane l of it KEY_DIM / 16 consecutive keys of group l / 2, columns 4 (l % 2) .. + 4.
//
// A row takes one pass over the state for Sᵀk and Sᵀq together: out = e^g Sᵀq + (k · q) d, where S is the
// state before the row. Pending rows and this pass's rows go through the same `take_up`.
//
// KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM; TILED: the head map; BLOCK: rows of a deferred pass; DEFERRED.

#define TILE 16
#define KEYS (KEY_HEADS * KEY_DIM)
#define VALUES (VALUE_HEADS * VALUE_DIM)
#define HALF (BLOCK * (KEYS + VALUES + VALUE_HEADS))
#define OWN (KEY_DIM / 16)
#define STAGE 8
#define THREADS 64

struct Stage {
    float k[STAGE][KEY_DIM], q[STAGE][KEY_DIM], v[STAGE][TILE];
    float decay[STAGE], beta[STAGE], kq[STAGE];
};

struct State {
    float s[OWN][4];
};

__device__ __forceinline__ void own_keys(float (&to)[OWN], const float* row, u32 group) {
    const float* from = row + group * OWN;
    if (OWN % 4 == 0) {
#pragma unroll
        for (int i = 0; i < OWN / 4; i++) {
            float4 x = ((const float4*)from)[i];
            to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < OWN; i++) to[i] = from[i];
    }
}

// S = decay S + k dᵀ
__device__ __forceinline__ void take_up(State& state, float decay, const float (&k)[OWN], const float (&d)[4]) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            state.s[i][c] = __fmaf_rn(k[i], d[c], __fmul_rn(decay, state.s[i][c]));
}

__device__ __forceinline__ void store(float4* to, const State& state) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
        to[i * TILE / 4] = make_float4(state.s[i][0], state.s[i][1], state.s[i][2], state.s[i][3]);
}

extern "C" __global__ void __launch_bounds__(THREADS) scan(
    const float* q, const float* k, const float* v, const float* g, const float* beta, float* state,
    float* pending, float* out, const LaneStep* steps) {
    __shared__ __align__(16) Stage stage;
    launch_next();
    u32 tile = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 key_head = TILED ? head % KEY_HEADS : head / (VALUE_HEADS / KEY_HEADS);
    bool keeps_key = TILED ? head < KEY_HEADS : head % (VALUE_HEADS / KEY_HEADS) == 0;
    u32 group = lane / 2, quad = 8 * warp + 4 * (lane % 2);
    u32 column = head * VALUE_DIM + tile * TILE;
    wait();

    LaneStep step = steps[blockIdx.z];
    u64 tiles = (u64)(step.slot * VALUE_HEADS + head) * (VALUE_DIM / TILE) + tile;
    float4* at = (float4*)(state + (tiles * KEY_DIM + group * OWN) * TILE + quad);
    State s;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float4 x = at[i * TILE / 4];
        s.s[i][0] = x.x, s.s[i][1] = x.y, s.s[i][2] = x.z, s.s[i][3] = x.w;
    }
    const float* kept = pending + (u64)(step.slot * 2 + step.parity) * HALF;
    float* next = pending + (u64)(step.slot * 2 + 1 - step.parity) * HALF;

    for (u32 first = 0; first < step.pending; first += STAGE) {
        u32 rows = min(step.pending - first, STAGE);
        for (u32 i = thread; i < rows * KEY_DIM; i += THREADS) {
            u32 r = i / KEY_DIM, c = i % KEY_DIM;
            stage.k[r][c] = kept[(first + r) * KEYS + key_head * KEY_DIM + c];
        }
        const float* d = kept + BLOCK * KEYS;
        for (u32 i = thread; i < rows * TILE; i += THREADS)
            stage.v[i / TILE][i % TILE] = d[(first + i / TILE) * VALUES + column + i % TILE];
        const float* decays = d + BLOCK * VALUES;
        if (thread < rows) stage.decay[thread] = expf(decays[(first + thread) * VALUE_HEADS + head]);
        __syncthreads();
        for (u32 r = 0; r < rows; r++) {
            float key[OWN];
            own_keys(key, stage.k[r], group);
            float4 x = *(const float4*)&stage.v[r][quad];
            float d[4] = {x.x, x.y, x.z, x.w};
            take_up(s, stage.decay[r], key, d);
        }
        __syncthreads();
    }
    if (DEFERRED && step.pending > 0) store(at, s);

    for (u32 first = 0; first < step.rows; first += STAGE) {
        u32 rows = min(step.rows - first, STAGE);
        u64 row0 = step.row0 + first;
        for (u32 i = thread; i < rows * KEY_DIM; i += THREADS) {
            u32 r = i / KEY_DIM, c = i % KEY_DIM;
            u64 from = (row0 + r) * KEYS + key_head * KEY_DIM + c;
            float key = k[from];
            stage.k[r][c] = key, stage.q[r][c] = q[from];
            if (DEFERRED && keeps_key && tile == 0) next[(first + r) * KEYS + key_head * KEY_DIM + c] = key;
        }
        for (u32 i = thread; i < rows * TILE; i += THREADS)
            stage.v[i / TILE][i % TILE] = v[(row0 + i / TILE) * VALUES + column + i % TILE];
        if (thread < rows) {
            float decay = g[(row0 + thread) * VALUE_HEADS + head];
            stage.decay[thread] = expf(decay);
            stage.beta[thread] = beta[(row0 + thread) * VALUE_HEADS + head];
            if (DEFERRED && tile == 0)
                next[BLOCK * (KEYS + VALUES) + (first + thread) * VALUE_HEADS + head] = decay;
        }
        __syncthreads();
        for (u32 r = warp; r < rows; r += 2) {
            float sum = 0.0f;
            for (u32 c = lane; c < KEY_DIM; c += 32) sum = __fmaf_rn(stage.k[r][c], stage.q[r][c], sum);
            sum = warp_sum(sum);
            if (lane == 0) stage.kq[r] = sum;
        }
        __syncthreads();
        for (u32 r = 0; r < rows; r++) {
            float key[OWN], query[OWN], sums[8];
            own_keys(key, stage.k[r], group);
            own_keys(query, stage.q[r], group);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sums[c] = key[0] * s.s[0][c], sums[4 + c] = query[0] * s.s[0][c];
#pragma unroll
                for (int i = 1; i < OWN; i++) {
                    sums[c] = __fmaf_rn(key[i], s.s[i][c], sums[c]);
                    sums[4 + c] = __fmaf_rn(query[i], s.s[i][c], sums[4 + c]);
                }
            }
            // Over the 16 groups: lanes below 16 end up with Sᵀk of column `own`, the others with Sᵀq.
#pragma unroll
            for (int width = 4, mask = 16; width > 0; width /= 2, mask /= 2) {
                bool upper = lane & mask;
#pragma unroll
                for (int i = 0; i < width; i++) {
                    float give = upper ? sums[i] : sums[width + i];
                    float keep = upper ? sums[width + i] : sums[i];
                    sums[i] = keep + __shfl_xor_sync(WARP_ALL, give, mask);
                }
            }
            float sum = sums[0] + __shfl_xor_sync(WARP_ALL, sums[0], 2);
            u32 own = (lane & 8 ? 2 : 0) + (lane & 4 ? 1 : 0);
            float decay = stage.decay[r];
            float delta = stage.beta[r] * __fmaf_rn(-decay, sum, stage.v[r][quad + own]);
            float d[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                d[c] = __shfl_sync(WARP_ALL, delta, (c & 2 ? 8 : 0) + (c & 1 ? 4 : 0) + lane % 2);
            take_up(s, decay, key, d);
            delta = __shfl_sync(WARP_ALL, delta, lane & 15);
            u32 to = column + quad + own;
            if ((lane & 18) == 16)
                out[(row0 + r) * VALUES + to] = __fmaf_rn(stage.kq[r], delta, decay * sum);
            else if (DEFERRED && (lane & 18) == 0)
                next[BLOCK * KEYS + (first + r) * VALUES + to] = delta;
        }
        __syncthreads();
    }
    if (!DEFERRED && step.pending + step.rows > 0) store(at, s);
}
