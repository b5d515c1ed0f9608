// A warp does one head (of q, k or v) for up to ROWS rows of a lane; lane l has the head's channels l, l + 32, …
// The warps after the last head do the gates.
//
// KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM; BLOCK: rows of a deferred pass; DEFERRED; ROWS.

#define KEYS (KEY_HEADS * KEY_DIM)
#define VALUES (VALUE_HEADS * VALUE_DIM)
#define CHANNELS (2 * KEYS + VALUES)
#define HEADS (2 * KEY_HEADS + VALUE_HEADS)
#define TAPS 4
#define HEIGHT (TAPS - 1 + BLOCK)
#define MAX_DIM (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM)
#define OWN ((MAX_DIM + 31) / 32)
#define L2_EPS 1e-6f

// Row t of a lane's stream, counted from the first row of this pass; the three before it are history.
__device__ __forceinline__ const float* stream_row(
    const float* qkv, const float* history, const LaneStep& step, int t) {
    if (t >= 0) return qkv + (u64)(step.row0 + t) * CHANNELS;
    u32 row = step.pending + (TAPS - 1) + t;
    return history + ((u64)(step.slot * 2 + step.parity) * HEIGHT + row) * CHANNELS;
}

__device__ __forceinline__ void gates(
    const LaneStep& step, u32 first, u32 last, const float* a, const float* b, const float* decay,
    const float* dt_bias, float* g, float* beta) {
    for (u32 i = threadIdx.x % 32; i < (last - first) * VALUE_HEADS; i += 32) {
        u32 h = i % VALUE_HEADS;
        u64 at = (u64)(step.row0 + first) * VALUE_HEADS + i;
        float x = a[at] + dt_bias[h];
        g[at] = decay[h] * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
        beta[at] = 1.0f / (1.0f + expf(-b[at]));
    }
}

extern "C" __global__ void __launch_bounds__(128) gdn_prepare(
    const float* qkv, const float* a, const float* b, const float* conv, const float* decay,
    const float* dt_bias, float* history, float* q, float* k, float* v, float* g, float* beta,
    const LaneStep* steps) {
    launch_next();
    u32 head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 kind = head < KEY_HEADS ? 0 : head < 2 * KEY_HEADS ? 1 : 2;
    u32 dim = kind < 2 ? KEY_DIM : VALUE_DIM;
    u32 start = kind < 2 ? head * KEY_DIM : 2 * KEYS + (head - 2 * KEY_HEADS) * VALUE_DIM;
    float taps[OWN][TAPS];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        u32 c = lane + 32 * i;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            taps[i][j] = head < HEADS && c < dim ? conv[j * CHANNELS + start + c] : 0.0f;
    }
    wait();

    LaneStep step = steps[blockIdx.z];
    u32 first = blockIdx.y * ROWS, last = min(first + ROWS, step.rows);
    if (first > 0 && first >= step.rows) return;
    if (head >= HEADS) {
        if (head == HEADS) gates(step, first, last, a, b, decay, dt_bias, g, beta);
        return;
    }

    float* out = kind == 0 ? q + start : kind == 1 ? k + start - KEYS : v + start - 2 * KEYS;
    u32 width = kind < 2 ? KEYS : VALUES;
    float* kept = history + ((u64)(step.slot * 2 + 1 - step.parity) * HEIGHT) * CHANNELS + start;
    float u[OWN][TAPS];
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) {
        const float* from = stream_row(qkv, history, step, (int)first + j - (TAPS - 1)) + start;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32 c = lane + 32 * i;
            u[i][j + 1] = c < dim ? from[c] : 0.0f;
            if (DEFERRED && first == 0 && c < dim) kept[j * CHANNELS + c] = u[i][j + 1];
        }
    }
    for (u32 t = first; t < last; t++) {
        const float* from = qkv + (u64)(step.row0 + t) * CHANNELS + start;
        float y[OWN], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32 c = lane + 32 * i;
#pragma unroll
            for (int j = 0; j < TAPS - 1; j++) u[i][j] = u[i][j + 1];
            u[i][TAPS - 1] = c < dim ? from[c] : 0.0f;
            if (DEFERRED && c < dim) kept[(TAPS - 1 + t) * CHANNELS + c] = u[i][TAPS - 1];
            float x = taps[i][0] * u[i][0];
#pragma unroll
            for (int j = 1; j < TAPS; j++) x = __fmaf_rn(taps[i][j], u[i][j], x);
            y[i] = x / (1.0f + expf(-x));
            squares = __fmaf_rn(y[i], y[i], squares);
        }
        float length = 1.0f;
        if (kind < 2) {
            length = 1.0f / sqrtf(warp_sum(squares) + L2_EPS);
            if (kind == 0) length /= sqrtf((float)KEY_DIM);
        }
        float* to = out + (u64)(step.row0 + t) * width;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32 c = lane + 32 * i;
            if (c < dim) to[c] = y[i] * length;
        }
    }
    // The last three rows of the stream, by the warp that has its end.
    if (!DEFERRED && last == step.rows) {
        for (int j = 0; j < TAPS - 1; j++) {
            int t = (int)step.rows + j - (TAPS - 1);
            const float* from = stream_row(qkv, history, step, t) + start;
            for (u32 c = lane; c < dim; c += 32) kept[j * CHANNELS + c] = from[c];
        }
    }
}
