// gdn_mix as a stage of a chain: convolution, gates, delta rule and norm for a few rows of each lane, deferred
// shapes   those of the parts: gdn_prepare, gated_delta, gated_norm; out (rows, VALUES) bf16 or f32, GDN_STRIDE bytes a row
// work     two teams of warps, one in each block of a cluster, have a value head of a lane at a time, each half of its columns; each of a
//          team's first COLUMN_WARPS warps has SETS times eight of them: of a set, lane l has the keys l / 2 + 16 i and columns
//          4 (l % 2) .. + 4, in registers
// traffic  the state read once and written once; of the rows, q and k once for each of a key head's blocks
// source   definition: the parts' reference(). Row t of a pass has the bits of a pass of its own: see gated_delta/scan.cu
// words    qkv, a, b, gate, conv, decay, dt_bias, weight, history, state, pending, out, steps, eps, lanes
//
// While other blocks are awaited, of this stage or an earlier one (chain.cu): the state takes up the pending rows and goes back to memory.
// It, the pending rows, the history and the steps are lane memory (kernel.rs). After that, in turns of up to TURN rows:
// a warp convolves and norms a row, all warps scan the rows, a warp norms a row's output; the halves of a row's sum of
// squares meet through the cluster.
//
// GDN_KEY_HEADS, GDN_VALUE_HEADS, GDN_KEY_DIM, GDN_VALUE_DIM; GDN_TILED: the head map; GDN_BLOCK: rows of a deferred pass;
// GDN_STRIDE; GDN_BF16. TEAMS: of a block; TEAM_WARPS: of a team.

namespace gdn {

constexpr u32 KEY_HEADS = GDN_KEY_HEADS, VALUE_HEADS = GDN_VALUE_HEADS, KEY_DIM = GDN_KEY_DIM, VALUE_DIM = GDN_VALUE_DIM;
constexpr u32 KEYS = KEY_HEADS * KEY_DIM, VALUES = VALUE_HEADS * VALUE_DIM, CHANNELS = 2 * KEYS + VALUES;
constexpr u32 HEADS_OF_KEY = VALUE_HEADS / KEY_HEADS, TAPS = 4, TILE = 16;
// A half of the pending rows, in floats, and rows of a half of the history.
constexpr u32 HALF = GDN_BLOCK * (KEYS + VALUES + VALUE_HEADS), HEIGHT = TAPS - 1 + GDN_BLOCK;
constexpr float L2_EPS = 1e-6f;

constexpr u32 THREADS = 32 * TEAM_WARPS;
constexpr u32 COLUMNS = VALUE_DIM / 2, SETS = COLUMNS > 8 * TEAM_WARPS ? 2 : 1;  // of a team; of a warp, eight columns each
constexpr u32 COLUMN_WARPS = COLUMNS / (8 * SETS);                               // that have columns
constexpr u32 OWN = KEY_DIM / 16;                                                // keys of a lane
constexpr u32 TURN = 8;                                                          // rows at a time
// A team's channels of a row: a query head, a key head, its half of a value head; four to a thread.
constexpr u32 WIDTH = 2 * KEY_DIM + COLUMNS, QUADS = WIDTH / 4, KEY_QUADS = (KEY_DIM + 127) / 128;
static_assert(COLUMN_WARPS <= TEAM_WARPS && COLUMN_WARPS * 8 * SETS == COLUMNS, "a warp for every set of columns");

// The same for all lanes, as the compiler can tell: what it takes for a branch of some of them makes all loops of a chain slower.
__device__ __forceinline__ u32 warp_of_block() {
    return __shfl_sync(WARP_ALL, threadIdx.x / 32, 0);
}
__device__ __forceinline__ u32 team() {
    return TEAMS > 1 ? warp_of_block() / TEAM_WARPS : 0;
}
// Of the team.
__device__ __forceinline__ u32 warp_of_team() {
    return TEAMS > 1 ? warp_of_block() % TEAM_WARPS : warp_of_block();
}
__device__ __forceinline__ u32 thread_of_team() {
    return TEAMS > 1 ? threadIdx.x % THREADS : threadIdx.x;
}
__device__ __forceinline__ void team_barrier() {
    barrier(TEAMS > 1 ? 8 + team() : 1, THREADS);
}

// What a team has of an item.
struct alignas(16) Shared {
    float taps[TAPS][WIDTH];
    float stream[TAPS - 1 + TURN][WIDTH];
    float k[TURN][KEY_DIM], q[TURN][KEY_DIM]; // in the order of `place`
    float v[TURN][COLUMNS], out[TURN][COLUMNS], gate[TURN][COLUMNS];
    float weight[COLUMNS];
    float decay[TURN], beta[TURN], kq[TURN];
};
// Where a team finds what that of the other block sent, in even and odd exchanges.
struct Mailbox {
    float squares[2][TURN];
    u64 sent[2];
};

// Which part of the layer a block has.
struct Part {
    u32 half, head, key_head;
    bool keeps_key; // leaves the key head's rows for the next pass

    Part() = default;
    __device__ __forceinline__ explicit Part(u32 head) : half(blockIdx.x % 2), head(head) {
        key_head = GDN_TILED ? head % KEY_HEADS : head / HEADS_OF_KEY;
        keeps_key = half == 0 && (GDN_TILED ? head < KEY_HEADS : head % HEADS_OF_KEY == 0);
    }
    // The first of the block's columns in a row of values.
    __device__ __forceinline__ u32 column() const {
        return head * VALUE_DIM + half * COLUMNS;
    }
    // Where the block's channel c lies in a row of channels.
    __device__ __forceinline__ u32 channel(u32 c) const {
        if (c < KEY_DIM) return key_head * KEY_DIM + c;
        if (c < 2 * KEY_DIM) return KEYS + key_head * KEY_DIM + c - KEY_DIM;
        return 2 * KEYS + column() + c - 2 * KEY_DIM;
    }
};

// A float into the other block's shared memory, counted by its barrier. Nothing else has to be visible there, so
// this waits for nothing.
__device__ __forceinline__ void send(const float* to, float x, const u64* bar, u32 block) {
    asm volatile(
        "{\n.reg .u32 there, bar;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 bar, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [bar];\n}" ::"r"(shared_address(to)),
        "r"(__float_as_uint(x)), "r"(shared_address(bar)), "r"(block)
        : "memory");
}

// Until what the other block sent is there.
__device__ __forceinline__ void await_sent(const u64* bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            shared_address(bar)),
        "r"(parity)
        : "memory");
}

// x / (1 + e^-x), to some units in the last place.
__device__ __forceinline__ float quick_silu(float x) {
    return __fdividef(x, 1.0f + expf(-x));
}

// Elements of a head so that a thread's keys lie side by side.
__device__ __forceinline__ u32 place(u32 key) {
    return key % 16 * OWN + key / 16;
}
__device__ __forceinline__ void store_placed(float* row, u32 key, float4 x) {
    row[place(key)] = x.x, row[place(key + 1)] = x.y, row[place(key + 2)] = x.z, row[place(key + 3)] = x.w;
}

// This thread's keys of a row, from shared memory, however often it asks.
__device__ __forceinline__ void own_keys(float (&to)[OWN], const float* row) {
    const float* from = row + threadIdx.x % 32 / 2 * OWN;
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

struct State {
    float s[SETS][OWN][4];

    // S = decay S + k dᵀ
    __device__ __forceinline__ void take_up(float decay, const float* row, const float (&d)[SETS][4]) {
        float k[OWN];
        own_keys(k, row);
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < OWN; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) s[set][i][c] = __fmaf_rn(k[i], d[set][c], __fmul_rn(decay, s[set][i][c]));
    }
};

// The first of the team's columns that this thread has, in a set of its warp.
__device__ __forceinline__ u32 own_column(u32 set) {
    return (warp_of_team() * SETS + set) * 8 + threadIdx.x % 2 * 4;
}
__device__ __forceinline__ float4* state_of(float* state, const LaneStep& step, const Part& part, u32 set) {
    u32 lane = threadIdx.x % 32, column = part.half * COLUMNS + own_column(set);
    u64 tile = (u64)(step.slot * VALUE_HEADS + part.head) * (VALUE_DIM / TILE) + column / TILE;
    return (float4*)(state + (tile * KEY_DIM + lane / 2) * TILE + column % TILE);
}

// Rows that the previous pass left and that were kept.
__device__ __forceinline__ void take_up_pending(
    Shared& shared, State& s, float* state, const float* kept, const LaneStep& step, const Part& part) {
    u32 warp = warp_of_team(), lane = threadIdx.x % 32;
    const float *d = kept + GDN_BLOCK * KEYS, *g = d + GDN_BLOCK * VALUES;
#pragma unroll 1
    for (u32 first = 0; first < step.pending; first += TURN) {
        u32 rows = min(step.pending - first, TURN);
#pragma unroll 1
        for (u32 r = warp; r < rows; r += TEAM_WARPS) {
            const float* k = kept + (first + r) * KEYS + part.key_head * KEY_DIM;
#pragma unroll
            for (u32 c = 4 * lane; c < KEY_DIM; c += 128) store_placed(shared.k[r], c, __ldcg((const float4*)(k + c)));
            if (4 * lane < COLUMNS)
                *(float4*)&shared.v[r][4 * lane] =
                    __ldcg((const float4*)(d + (first + r) * VALUES + part.column() + 4 * lane));
            if (lane == 0) shared.decay[r] = expf(__ldcg(g + (first + r) * VALUE_HEADS + part.head));
        }
        team_barrier();
#pragma unroll 1
        for (u32 r = 0; r < rows && warp < COLUMN_WARPS; r++) {
            float row[SETS][4];
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                float4 x = *(const float4*)&shared.v[r][own_column(set)];
                row[set][0] = x.x, row[set][1] = x.y, row[set][2] = x.z, row[set][3] = x.w;
            }
            s.take_up(shared.decay[r], shared.k[r], row);
        }
        team_barrier();
    }
    if (step.pending == 0 || warp >= COLUMN_WARPS) return;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        float4* to = state_of(state, step, part, set);
#pragma unroll
        for (int i = 0; i < OWN; i++) to[4 * TILE * i] = make_float4(s.s[set][i][0], s.s[set][i][1], s.s[set][i][2], s.s[set][i][3]);
    }
}

// Rows `first - 3 + from .. first - 3 + to` of the lane's stream; those below 0 are history.
__device__ __forceinline__ void copy_stream(
    Shared& shared, const float* qkv, const float* history, const LaneStep& step, const Part& part, u32 first,
    u32 from, u32 to) {
#pragma unroll 1
    for (u32 i = from * QUADS + thread_of_team(); i < to * QUADS; i += THREADS) {
        u32 r = i / QUADS, c = 4 * (i % QUADS);
        const float* row = first + r < TAPS - 1
                               ? history + (step.pending + r) * CHANNELS
                               : qkv + (u64)(step.row0 + first + r - (TAPS - 1)) * CHANNELS;
        copy16(shared_address(&shared.stream[r][c]), row + part.channel(c), 16);
    }
}

// silu(Σ_j taps[j] · stream[r + j]) of the block's channels c .. c + 4.
__device__ __forceinline__ float4 convolve(const Shared& shared, u32 r, u32 c) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
        float4 w = *(const float4*)&shared.taps[j][c], u = *(const float4*)&shared.stream[r + j][c];
        sum.x = __fmaf_rn(w.x, u.x, sum.x), sum.y = __fmaf_rn(w.y, u.y, sum.y);
        sum.z = __fmaf_rn(w.z, u.z, sum.z), sum.w = __fmaf_rn(w.w, u.w, sum.w);
    }
    return make_float4(quick_silu(sum.x), quick_silu(sum.y), quick_silu(sum.z), quick_silu(sum.w));
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}
__device__ __forceinline__ float4 scaled(float4 a, float by) {
    return make_float4(a.x * by, a.y * by, a.z * by, a.w * by);
}

// One row of q, k and v, by one warp. `kept`: where the next pass finds k, or null.
__device__ __forceinline__ void prepare_row(Shared& shared, u32 r, float* kept) {
    u32 lane = threadIdx.x % 32;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 q[KEY_QUADS], k[KEY_QUADS];
    float qq = 0.0f, kk = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < KEY_QUADS; i++) {
        u32 c = 4 * lane + 128 * i;
        q[i] = c < KEY_DIM ? convolve(shared, r, c) : zero;
        k[i] = c < KEY_DIM ? convolve(shared, r, KEY_DIM + c) : zero;
        qq = dot(q[i], q[i], qq), kk = dot(k[i], k[i], kk), kq = dot(k[i], q[i], kq);
    }
    if (4 * lane < COLUMNS) *(float4*)&shared.v[r][4 * lane] = convolve(shared, r, 2 * KEY_DIM + 4 * lane);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        qq += __shfl_xor_sync(WARP_ALL, qq, d);
        kk += __shfl_xor_sync(WARP_ALL, kk, d);
        kq += __shfl_xor_sync(WARP_ALL, kq, d);
    }
    float q_length = 1.0f / sqrtf(qq + L2_EPS) / sqrtf((float)KEY_DIM), k_length = 1.0f / sqrtf(kk + L2_EPS);
    if (lane == 0) shared.kq[r] = kq * q_length * k_length;
#pragma unroll
    for (int i = 0; i < KEY_QUADS; i++) {
        u32 c = 4 * lane + 128 * i;
        if (c >= KEY_DIM) continue;
        k[i] = scaled(k[i], k_length);
        store_placed(shared.q[r], c, scaled(q[i], q_length));
        store_placed(shared.k[r], c, k[i]);
        if (kept) *(float4*)(kept + c) = k[i];
    }
}

// One row of the rule on all of the team's columns: out = e^g Sᵀq + (k · q) d, where S is the state before the
// row. `kept`: where the next pass finds the team's part of d.
__device__ __forceinline__ void scan_row(Shared& shared, State& s, u32 r, float* kept) {
    u32 lane = threadIdx.x % 32;
    float sums[SETS][8];
    {
        float k[OWN], q[OWN];
        own_keys(k, shared.k[r]);
        own_keys(q, shared.q[r]);
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sums[set][c] = k[0] * s.s[set][0][c], sums[set][4 + c] = q[0] * s.s[set][0][c];
#pragma unroll
                for (int i = 1; i < OWN; i++) {
                    sums[set][c] = __fmaf_rn(k[i], s.s[set][i][c], sums[set][c]);
                    sums[set][4 + c] = __fmaf_rn(q[i], s.s[set][i][c], sums[set][4 + c]);
                }
            }
    }
    // Over the 16 groups of keys: lanes below 16 end up with Sᵀk of column `own`, the others with Sᵀq.
#pragma unroll
    for (int width = 4, mask = 16; width > 0; width /= 2, mask /= 2) {
        bool upper = lane & mask;
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < width; i++) {
                float give = upper ? sums[set][i] : sums[set][width + i];
                float keep = upper ? sums[set][width + i] : sums[set][i];
                sums[set][i] = keep + __shfl_xor_sync(WARP_ALL, give, mask);
            }
    }
    u32 own = (lane & 8 ? 2 : 0) + (lane & 4 ? 1 : 0);
    float decay = shared.decay[r], beta = shared.beta[r], kq = shared.kq[r];
    float sum[SETS], delta[SETS], d[SETS][4];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        sum[set] = sums[set][0] + __shfl_xor_sync(WARP_ALL, sums[set][0], 2);
        delta[set] = beta * __fmaf_rn(-decay, sum[set], shared.v[r][own_column(set) + own]);
#pragma unroll
        for (int c = 0; c < 4; c++) d[set][c] = __shfl_sync(WARP_ALL, delta[set], (c & 2 ? 8 : 0) + (c & 1 ? 4 : 0) + lane % 2);
    }
    s.take_up(decay, shared.k[r], d);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        float below = __shfl_sync(WARP_ALL, delta[set], lane & 15);
        u32 column = own_column(set) + own;
        if ((lane & 18) == 16) shared.out[r][column] = __fmaf_rn(kq, below, decay * sum[set]);
        else if ((lane & 18) == 0) kept[column] = below;
    }
}

// Of the block's part of a row's output. By one warp.
__device__ __forceinline__ float squares_of(const Shared& shared, u32 r) {
    u32 c = 4 * (threadIdx.x % 32);
    float4 x = c < COLUMNS ? *(const float4*)&shared.out[r][c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return warp_sum(dot(x, x, 0.0f));
}

// Log decay and beta of one row.
struct Gates {
    float a, b, decay, dt_bias;

    __device__ __forceinline__ float log_decay() const {
        float x = a + dt_bias;
        return decay * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
    }
    __device__ __forceinline__ float beta() const {
        return 1.0f / (1.0f + expf(-b));
    }
};

// A head of a lane, on its way through the stage.
struct Item {
    Part part;
    LaneStep step;
    State s;
};

// A team's way to that of the other block.
struct Peer {
    Mailbox& mailbox;
    u32 exchanges;  // so far
};

__device__ __forceinline__ void init(Mailbox& mailbox) {
    phase_init(shared_address(&mailbox.sent[0]), 1), phase_init(shared_address(&mailbox.sent[1]), 1);
}

// What needs nothing of this pass: the state as the rows before left it. If that has `begun` already, it is read once more, for
// there was no place to keep it.
__device__ __forceinline__ void begin(Shared& shared, Item& item, const u64* word, u32 index, bool begun) {
    const float *qkv = (const float*)word[0], *conv = (const float*)word[4], *weight = (const float*)word[7];
    float *history = (float*)word[8], *state = (float*)word[9], *pending = (float*)word[10];
    item.part = Part(index % VALUE_HEADS), item.step = step_of((const LaneStep*)word[12], index / VALUE_HEADS);
    const Part& part = item.part;
    const LaneStep& step = item.step;
    const u32 thread = thread_of_team();
    if (warp_of_team() < COLUMN_WARPS)
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float4* from = state_of(state, step, part, set);
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                float4 x = __ldcg(from + 4 * TILE * i);
                item.s.s[set][i][0] = x.x, item.s.s[set][i][1] = x.y, item.s.s[set][i][2] = x.z, item.s.s[set][i][3] = x.w;
            }
        }
    if (begun) return;
#pragma unroll 1
    for (u32 i = thread; i < TAPS * QUADS; i += THREADS) {
        u32 j = i / QUADS, c = 4 * (i % QUADS);
        copy16(shared_address(&shared.taps[j][c]), conv + j * CHANNELS + part.channel(c), 16);
    }
    if (4 * thread < COLUMNS) copy16(shared_address(&shared.weight[4 * thread]), weight + part.half * COLUMNS + 4 * thread, 16);
    const u64 half = step.slot * 2 + step.parity;
    copy_stream(shared, qkv, history + half * HEIGHT * CHANNELS, step, part, 0, 0, TAPS - 1);
    take_up_pending(shared, item.s, state, pending + half * HALF, step, part);
}

// The rows of this pass.
__device__ __forceinline__ void finish(Shared& shared, Item& item, const u64* word, Peer& peer) {
    const float *qkv = (const float*)word[0], *a = (const float*)word[1], *b = (const float*)word[2], *z = (const float*)word[3];
    const float *log_decay = (const float*)word[5], *dt_bias = (const float*)word[6];
    float *history = (float*)word[8], *pending = (float*)word[10];
    u8* out = (u8*)word[11];
    const float eps = __uint_as_float(word[13]);
    const Part& part = item.part;
    const LaneStep& step = item.step;
    const u32 thread = thread_of_team(), warp = warp_of_team(), lane = thread % 32;
    const u64 other = step.slot * 2 + 1 - step.parity;
    float *next = pending + other * HALF, *past = history + other * HEIGHT * CHANNELS;
#pragma unroll 1
    for (u32 first = 0; first == 0 || first < step.rows; first += TURN) {
        const u32 rows = min(step.rows - first, TURN), before = first == 0 ? TAPS - 1 : 0;
        copy_stream(shared, qkv, nullptr, step, part, first, before, TAPS - 1 + rows);
#pragma unroll 1
        for (u32 i = thread; i < rows * (COLUMNS / 4); i += THREADS) {
            u32 r = i / (COLUMNS / 4), c = 4 * (i % (COLUMNS / 4));
            const float* row = z + (u64)(step.row0 + first + r) * VALUES + part.column();
            copy16(shared_address(&shared.gate[r][c]), row + c, 16);
        }
        copies_commit();
        const u32 gated = warp == TEAM_WARPS - 1 ? lane : TURN;
        Gates gates = {0.0f, 0.0f, 0.0f, 0.0f};
        if (gated < rows) {
            u64 at = (u64)(step.row0 + first + gated) * VALUE_HEADS + part.head;
            gates = {__ldcg(a + at), __ldcg(b + at), log_decay[part.head], dt_bias[part.head]};
        }
        copies_wait<0>();
        team_barrier();

#pragma unroll 1
        for (u32 r = warp; r < rows; r += TEAM_WARPS)
            prepare_row(shared, r, part.keeps_key ? next + (first + r) * KEYS + part.key_head * KEY_DIM : nullptr);
        if (gated < rows) {
            float g = gates.log_decay();
            shared.decay[gated] = expf(g), shared.beta[gated] = gates.beta();
            if (part.half == 0) next[GDN_BLOCK * (KEYS + VALUES) + (first + gated) * VALUE_HEADS + part.head] = g;
        }
        team_barrier();

        float* deltas = next + GDN_BLOCK * KEYS + part.column();
#pragma unroll 1
        for (u32 r = 0; r < rows && warp < COLUMN_WARPS; r++) scan_row(shared, item.s, r, deltas + (first + r) * VALUES);
        team_barrier();

        const u64* sent = &peer.mailbox.sent[peer.exchanges % 2];
        float* squares_there = peer.mailbox.squares[peer.exchanges % 2];
        if (thread == 0 && rows > 0) phase_arrive_expecting(shared_address(sent), 4 * rows);
#pragma unroll 1
        for (u32 r = warp; r < rows; r += TEAM_WARPS) {
            float squares = squares_of(shared, r);
            if (lane == 0) send(&squares_there[r], squares, sent, part.half ^ 1);
        }
        // Meanwhile the history: the three rows before the pass, then its rows.
#pragma unroll 1
        for (u32 i = (TAPS - 1 - before) * QUADS + thread; i < (TAPS - 1 + rows) * QUADS; i += THREADS) {
            u32 r = i / QUADS, c = 4 * (i % QUADS);
            if (c < 2 * KEY_DIM && !part.keeps_key) continue;
            *(float4*)(past + (first + r) * CHANNELS + part.channel(c)) = *(const float4*)&shared.stream[r][c];
        }
        if (rows > 0) await_sent(sent, peer.exchanges / 2 % 2), peer.exchanges++;
#pragma unroll 1
        for (u32 r = warp; r < rows; r += TEAM_WARPS) {
            float squares = squares_of(shared, r) + squares_there[r];
            if (4 * lane >= COLUMNS) continue;
            float scale = 1.0f / sqrtf(__fadd_rn(squares / VALUE_DIM, eps));
            float4 x = *(const float4*)&shared.out[r][4 * lane], g = *(const float4*)&shared.gate[r][4 * lane];
            float4 w = *(const float4*)&shared.weight[4 * lane];
            float4 y = make_float4(x.x * scale * w.x * quick_silu(g.x), x.y * scale * w.y * quick_silu(g.y),
                                   x.z * scale * w.z * quick_silu(g.z), x.w * scale * w.w * quick_silu(g.w));
            act_store4<GDN_BF16>(out + (u64)(step.row0 + first + r) * GDN_STRIDE, part.column() + 4 * lane, y);
        }
        team_barrier();
    }
}

}  // namespace gdn
