// Measurement harness: ceilings, correctness against an f64 reference, and whole 27B chains in several launch styles.
// usage: bench <section>...   sections: info micro check chain shapes
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <string>
#include <vector>
#include <map>
#include <tuple>
#include <algorithm>
#include <functional>
#include <cuda_runtime.h>
#include "qmm.cuh"

#define CK(e)                                                                                     \
    do {                                                                                          \
        cudaError_t e_ = (e);                                                                     \
        if (e_ != cudaSuccess) {                                                                  \
            printf("CUDA error %s at %s:%d: %s\n", cudaGetErrorName(e_), __FILE__, __LINE__, #e); \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

static const double PEAK = 4.65e12;
static cudaStream_t st;
static int SMS;

// ------------------------------------------------------------------------------------------------ kernel registry
struct Kern {
    const char* name;
    const void* fn;
    int smem, threads, R, KW, NB, DEQ, persistent;
};
static std::vector<Kern> reg;
template <int R, int KW, int NB, int DEQ, int BPSM>
void add(const char* name) {  // BPSM 0: the persistent kernel
    const void* fn;
    if constexpr (BPSM == 0) fn = (const void*)qmm_persistent<R, KW, NB, DEQ>;
    else fn = (const void*)qmm_kernel<R, KW, NB, DEQ, BPSM>;
    using L = Layout<R, KW, NB>;
    CK(cudaFuncSetAttribute(fn, cudaFuncAttributeMaxDynamicSharedMemorySize, L::total));
    reg.push_back(Kern{name, fn, L::total, KW * 32, R, KW, NB, DEQ, BPSM == 0});
}
static void build_registry() {
    add<3, 16, 1, 0, 1>("16w");
    add<3, 16, 1, 3, 1>("16w compute");
    add<3, 16, 1, 2, 1>("16w stream");
    add<3, 16, 1, 0, 0>("P 16w");
    add<8, 8, 1, 0, 1>("8w");
    add<8, 8, 1, 0, 0>("P 8w");
}
static bool uses_f16(const Op& op) { return ALLF16 || op.kind == 5 || op.kind == 10; }
static const Kern& kern(const char* name) {
    for (auto& k : reg)
        if (!strcmp(k.name, name)) return k;
    printf("no kernel %s\n", name);
    exit(1);
}

static void launch(const Kern& k, int grid, Op op, int rows, int pdl) {
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(grid), c.blockDim = dim3(k.threads), c.dynamicSmemBytes = k.smem, c.stream = st;
    cudaLaunchAttribute at[2];
    int n = 0;
    if (op.sshift) at[n].id = cudaLaunchAttributeClusterDimension, at[n].val.clusterDim = {1u << op.sshift, 1, 1}, n++;
    if (pdl) at[n].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[n].val.programmaticStreamSerializationAllowed = 1, n++;
    c.attrs = at, c.numAttrs = n;
    void* args[] = {&op, &rows, &pdl};
    CK(cudaLaunchKernelExC(&c, k.fn, args));
}
static void launch_persistent(const Kern& k, const OpList& list, int rows, unsigned* counter) {
    CK(cudaMemsetAsync(counter, 0, 4, st));
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(SMS), c.blockDim = dim3(k.threads), c.dynamicSmemBytes = k.smem, c.stream = st;
    cudaLaunchAttribute at[1];
    at[0].id = cudaLaunchAttributeClusterDimension, at[0].val.clusterDim = {2, 1, 1};
    c.attrs = at, c.numAttrs = 1;
    void* args[] = {(void*)&list, &rows, &counter};
    CK(cudaLaunchKernelExC(&c, k.fn, args));
}

// ------------------------------------------------------------------------------------------------ data
__device__ __forceinline__ uint32_t hash32(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdull; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ull; x ^= x >> 33;
    return (uint32_t)x;
}
__device__ float rnd(uint64_t i) { return hash32(i) * (1.f / 4294967296.f); }
__global__ void fill_packed(uint8_t* w, size_t tiles, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < tiles * 144; i += (size_t)gridDim.x * blockDim.x) {
        size_t tile = i / 144;
        int k = i % 144;
        uint32_t v;
        if (k < 128) v = hash32(seed + i);
        else {
            float s = (rnd(seed * 3 + i) * 0.01f + 0.005f) * (hash32(seed + 7 * i) & 1 ? 1.f : -1.f);
            uint16_t s16 = bf16_bits(s * 16.f), b = bf16_bits(s * (-7.5f + rnd(seed + 5 * i) - 0.5f));
            v = s16 | (uint32_t)b << 16;
        }
        *(uint32_t*)(w + tile * CELL + k * 4) = v;
    }
}
__global__ void fill_mlx(uint32_t* w, uint16_t* s, uint16_t* b, size_t words, size_t groups, uint64_t seed) {
    size_t i0 = blockIdx.x * (size_t)blockDim.x + threadIdx.x, n = (size_t)gridDim.x * blockDim.x;
    for (size_t i = i0; i < words; i += n) w[i] = hash32(seed + i);
    for (size_t i = i0; i < groups; i += n) {
        float v = (rnd(seed * 3 + i) * 0.01f + 0.005f) * (hash32(seed + 7 * i) & 1 ? 1.f : -1.f);
        s[i] = bf16_bits(v), b[i] = bf16_bits(v * (-8.f + 4.f * rnd(seed + 5 * i)));
    }
}
__global__ void fill_x(uint16_t* x, size_t n, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        float u = sqrtf(-2.f * logf(rnd(seed + 2 * i) + 1e-9f)) * cospif(2.f * rnd(seed + 2 * i + 1));
        x[i] = bf16_bits(u);
    }
}
// MLX affine 4 bit [N][K/8], scales and biases [N][K/64] -> the packed layout. glu: row r of tile i is gate row 8i+r (r<8) or up row 8i+r-8 (+N/2).
__global__ void repack(uint8_t* out, const uint32_t* w, const uint16_t* s, const uint16_t* b, Op op, int KW, int f16, int glu) {
    int n_half = op.tiles * 8;
    size_t total = (size_t)op.tiles * op.groups * 32;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < total; i += (size_t)gridDim.x * blockDim.x) {
        int lane = i & 31, g = lane >> 2, t = lane & 3;
        int group = (i >> 5) % op.groups, tile = (i >> 5) / op.groups;
        int r0 = glu ? tile * 8 + g : tile * 16 + g, r1 = glu ? n_half + tile * 8 + g : r0 + 8;
        size_t kw = (size_t)op.groups * 8;
        const uint32_t* w0 = w + r0 * kw + group * 8;
        const uint32_t* w1 = w + r1 * kw + group * 8;
        uint32_t src0[2] = {w0[t], w0[4 + t]}, src1[2] = {w1[t], w1[4 + t]};
        uint8_t* dst = out + ((size_t)tile * op.groups + group) * CELL;
        for (int j = 0; j < 4; j++) {
            uint32_t a = src0[j >> 1] >> (16 * (j & 1)), c = src1[j >> 1] >> (16 * (j & 1));  // four nibbles of row g, of row g+8
            auto pair = [](uint32_t n, int i) { return (n >> (8 * i) & 15) | (n >> (8 * i + 4) & 15) << 16; };
            uint32_t v = f16 ? pair(a, 1) | pair(a, 0) << 4 | pair(c, 1) << 8 | pair(c, 0) << 12 : pair(a, 0) | pair(c, 0) << 4 | pair(a, 1) << 8 | pair(c, 1) << 12;
            v = f16 ? v << 2 | v >> 30 : v << 3 | v >> 29;
            *(uint32_t*)(dst + lane * 16 + j * 4) = v;
        }
        if (t == 0) {
            size_t q0 = (size_t)r0 * op.groups + group, q1 = (size_t)r1 * op.groups + group;
            uint32_t v0 = bf16_bits(16.f * __uint_as_float((uint32_t)s[q0] << 16)) | (uint32_t)b[q0] << 16;
            uint32_t v1 = bf16_bits(16.f * __uint_as_float((uint32_t)s[q1] << 16)) | (uint32_t)b[q1] << 16;
            *(uint32_t*)(dst + 512 + g * 8) = v0;
            *(uint32_t*)(dst + 512 + g * 8 + 4) = v1;
        }
    }
}
// natural [rows][ld] -> fragment order, bf16 or f16 with odd pairs times 16
__global__ void to_fragments(uint16_t* out, const uint16_t* x, int rows, int K, int ld, int ldx, int f16) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * K; i += gridDim.x * blockDim.x) {
        uint16_t v = x[(size_t)(i / K) * ld + i % K];
        if (f16) v = f16_bits(__uint_as_float((uint32_t)v << 16) * (i % K & 2 ? 16.f : 1.f));
        out[x_index(i / K, i % K, ldx)] = v;
    }
}
__global__ void reference(float* y, const uint32_t* w, const uint16_t* s, const uint16_t* b, const uint16_t* x, int N, int K, int ldx, int rows) {
    int n = blockIdx.x, lane = threadIdx.x;  // one warp per output
    for (int r = 0; r < rows; r++) {
        double acc = 0;
        for (int k = lane; k < K; k += 32) {
            uint32_t q = w[(size_t)n * (K / 8) + k / 8] >> (4 * (k % 8)) & 15;
            size_t g = (size_t)n * (K / 64) + k / 64;
            double wv = (double)__uint_as_float((uint32_t)s[g] << 16) * q + (double)__uint_as_float((uint32_t)b[g] << 16);
            acc += wv * (double)__uint_as_float((uint32_t)x[(size_t)r * ldx + k] << 16);
        }
        for (int o = 16; o; o >>= 1) acc += __shfl_xor_sync(~0u, acc, o);
        if (lane == 0) y[(size_t)r * N + n] = (float)acc;
    }
}

// ------------------------------------------------------------------------------------------------ shapes
struct Shape { const char* name; int N, K, S, glu; };
static const Shape IN = {"gdn_in", 16480, 5120, 1, 0}, QKV = {"attn_qkv", 14336, 5120, 1, 0}, OUT = {"out", 5120, 6144, 2, 0},
                   GU = {"gate_up", 34816, 5120, 1, 1}, DOWN = {"down", 5120, 17408, 2, 0}, HEAD = {"head", 248320, 5120, 1, 0};

static size_t weight_bytes(const Shape& s) { return (size_t)s.N / 16 * (s.K / 64) * CELL; }
struct Placed { Op op; int grid; size_t bytes; };
// Deals a shape's tiles to all SMs, S blocks to a run. grid 0: this kernel has no code for the shape.
static Placed place(const Shape& s, int S, const Kern& k) {
    Placed p = {};
    int clusters = SMS / S;
    p.op.tiles = s.N / 16, p.op.groups = s.K / 64, p.op.sshift = S == 2, p.op.cshift = (k.KW == 16 ? 4 : 3) + p.op.sshift;
    p.op.run_fix = (unsigned)((((unsigned long long)p.op.tiles << 24) + clusters - 1) / clusters);
    if (run_start(p.op, clusters) != p.op.tiles) printf("bad partition\n"), exit(1);
    p.op.kind = (p.op.groups + (1 << p.op.cshift) - 1) >> p.op.cshift;
    p.grid = clusters * S;
    if (k.KW == 16 ? p.op.kind != 3 && p.op.kind != 5 && (p.op.kind != 9 || k.NB > 1) : p.op.kind != 6 && p.op.kind != 10 && (p.op.kind != 17 || k.NB > 1)) p.grid = 0;
    if (S == 2 && (p.op.tiles + clusters - 1) / clusters > NX) p.grid = 0;
    p.op.alpha = 1.f, p.op.limit = 1e30f;
    p.bytes = (size_t)p.op.tiles * p.op.groups * CELL;
    return p;
}

// ------------------------------------------------------------------------------------------------ timing
struct Stat { double med, lo, hi; };
static Stat stat(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return {v[v.size() / 2], v.front(), v.back()};
}
static cudaGraphExec_t capture(const std::function<void()>& f) {
    cudaGraph_t g;
    cudaGraphExec_t e;
    CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    f();
    CK(cudaStreamEndCapture(st, &g));
    CK(cudaGraphInstantiate(&e, g, 0));
    CK(cudaGraphDestroy(g));
    return e;
}
static Stat time_graph(const std::function<void()>& f, int reps = 15) {
    cudaGraphExec_t e = capture(f);
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b));
    for (int i = 0; i < 3; i++) CK(cudaGraphLaunch(e, st));
    std::vector<double> v;
    for (int i = 0; i < reps; i++) {
        CK(cudaEventRecord(a, st));
        CK(cudaGraphLaunch(e, st));
        CK(cudaEventRecord(b, st));
        CK(cudaEventSynchronize(b));
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        v.push_back(ms * 1e-3);
    }
    CK(cudaGetLastError());
    CK(cudaGraphExecDestroy(e)); CK(cudaEventDestroy(a)); CK(cudaEventDestroy(b));
    return stat(v);
}

// ------------------------------------------------------------------------------------------------ micro
__global__ void read_l2(const uint4* p, size_t n, int times, uint32_t* out) {  // every block reads the whole (L2-resident) buffer from a different start
    uint32_t a = 0;
    size_t off = n / gridDim.x * blockIdx.x;
    for (int r = 0; r < times; r++)
        for (size_t i = threadIdx.x; i + 7 * blockDim.x < n; i += 8 * blockDim.x) {
            uint4 v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                size_t j = i + k * blockDim.x + off;
                if (j >= n) j -= n;
                asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w) : "l"(p + j));
            }
#pragma unroll
            for (int k = 0; k < 8; k++) a ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
        }
    if (a == 0x12345678) out[0] = a;
}
// One thread per block streams `chunk`-byte pieces through a ring: contiguous share per block, or piece i of block b at i*grid+b.
__global__ void read_seq(const uint8_t* p, size_t n, int chunk, int slots, int inter, int ahead, uint32_t* out) {
    extern __shared__ __align__(128) char smem[];
    uint32_t bars = smem_addr(smem), ring = bars + 512;
    size_t per = n / gridDim.x / chunk, stride = inter ? (size_t)gridDim.x * chunk : chunk;
    const uint8_t* base = p + (inter ? (size_t)blockIdx.x * chunk : (size_t)blockIdx.x * per * chunk);
    uint64_t pol = policy_evict_first();
    uint32_t a = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) mbar_init(bars + 8 * i, 1);
        mbar_init_fence();
        for (int i = 0; ahead && i < ahead; i++) bulk_prefetch_l2(base + (slots + i) * stride, chunk);
        for (size_t i = 0, s = 0, ph = 1; i < per + slots; i++) {
            if (i >= slots) {
                mbar_wait(bars + 8 * s, ph);
                a ^= lds64(ring + s * chunk).x;
            }
            if (i < per) {
                mbar_expect(bars + 8 * s, chunk);
                bulk_load(ring + s * chunk, base + i * stride, chunk, bars + 8 * s, pol);
                if (ahead && i + ahead < per) bulk_prefetch_l2(base + (i + ahead) * stride, chunk);
            }
            if (++s == slots) s = 0, ph ^= 1;
        }
    }
    if (a == 0x12345678) out[0] = a;
}
template <int U>
__global__ void read_stride(const uint4* p, size_t n, uint32_t* out) {  // whole grid sweeps one front
    size_t nt = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t a = 0;
    for (; i + (U - 1) * nt < n; i += U * nt) {
        uint4 v[U];
#pragma unroll
        for (int k = 0; k < U; k++) v[k] = ldw128(p + i + k * nt);
#pragma unroll
        for (int k = 0; k < U; k++) a ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (a == 0x12345678) out[0] = a;
}
__global__ void tiny(uint32_t* p, int pdl) {
    if (pdl) pdl_launch_dependents(), pdl_wait();
    if (threadIdx.x == 0) p[blockIdx.x] += 1;
}
__global__ void barriers(unsigned* counter, int n) {
    for (int i = 1; i <= n; i++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
            unsigned seen;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
            while (seen < gridDim.x * i);
        }
        __syncthreads();
    }
}
__global__ void mma_rate(float* out, int n) {
    float4 d[8];
    for (int i = 0; i < 8; i++) d[i] = make_float4(0, 0, 0, 0);
    uint32_t a = threadIdx.x * 0x3f803f80u, b = 0x3f803f80u ^ threadIdx.x;
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) mma(d[k], a, a, a, a, b, b);
    float s = 0;
    for (int i = 0; i < 8; i++) s += d[i].x + d[i].y + d[i].z + d[i].w;
    out[blockIdx.x * blockDim.x + threadIdx.x] = s;
}

static void micro(uint8_t* W, size_t bytes, uint32_t* scratch) {
    printf("== micro\n");
    size_t n = (size_t)8 << 30;
    for (int bpsm : {2, 8, 64}) {
        Stat t = time_graph([&] { read_stride<4><<<SMS * bpsm, 512, 0, st>>>((const uint4*)W, n / 16, scratch); }, 7);
        Stat t8 = time_graph([&] { read_stride<8><<<SMS * bpsm, 256, 0, st>>>((const uint4*)W, n / 16, scratch); }, 7);
        printf("read LDG.128 grid stride, %d blocks/SM: x4 %.3f TB/s (%.3f..%.3f)  x8 %.3f\n", bpsm, n / t.med / 1e12, n / t.hi / 1e12, n / t.lo / 1e12, n / t8.med / 1e12);
    }
    {
        Stat t = time_graph([&] { read_stride<1><<<(unsigned)(n / 16 / 1024), 1024, 0, st>>>((const uint4*)W, n / 16, scratch); }, 7);
        printf("read LDG.128 one per thread: %.3f TB/s\n", n / t.med / 1e12);
    }
    CK(cudaFuncSetAttribute(read_seq, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 * 1024));
    struct { int chunk, slots, ahead, grid; } sc[] = {{9216, 8, 0, 132}, {9216, 12, 0, 132}, {9216, 16, 0, 132}, {9216, 22, 0, 132}, {18432, 4, 0, 132}, {18432, 6, 0, 132}, {18432, 11, 0, 132}, {27648, 7, 0, 132}, {4608, 16, 0, 132},
                                                {4608, 44, 0, 132}, {9216, 6, 12, 132}, {9216, 6, 20, 132}, {9216, 12, 24, 132}, {18432, 11, 16, 132}, {18432, 6, 0, 264}, {9216, 12, 0, 264}};
    for (auto& c : sc)
        for (int inter = 0; inter < 2; inter++) {
            Stat t = time_graph([&] { read_seq<<<c.grid, 32, 512 + c.chunk * c.slots, st>>>(W, n, c.chunk, c.slots, inter, c.ahead, scratch); }, 7);
            printf("read bulk, %d blocks, %d x %d B (%d KB), L2 ahead %d chunks, %s: %.3f TB/s (%.3f..%.3f)\n", c.grid, c.slots, c.chunk, c.slots * c.chunk / 1024, c.ahead, inter ? "interleaved" : "contiguous", n / t.med / 1e12,
                   n / t.hi / 1e12, n / t.lo / 1e12);
        }
    for (size_t mb : {8, 16, 24, 32}) {
        size_t k = mb << 20;
        Stat t = time_graph([&] { read_l2<<<SMS * 2, 512, 0, st>>>((const uint4*)W, k / 16, 2, scratch); }, 7);
        printf("read L2-resident %zu MB: %.3f TB/s\n", mb, 2. * k * SMS * 2 / t.med / 1e12);
    }
    for (int pdl = 0; pdl < 2; pdl++)
        for (int grid : {8, 132}) {
            auto run = [&](int cnt) {
                return time_graph([&] {
                    for (int i = 0; i < cnt; i++) {
                        cudaLaunchConfig_t c = {};
                        c.gridDim = dim3(grid), c.blockDim = dim3(256), c.stream = st;
                        cudaLaunchAttribute at[1];
                        at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
                        c.attrs = at, c.numAttrs = pdl;
                        CK(cudaLaunchKernelEx(&c, tiny, scratch, pdl));
                    }
                }).med;
            };
            double a = run(200), b = run(600);
            printf("dependent tiny kernels in a graph, %s, %d blocks: %.3f us each\n", pdl ? "PDL" : "plain", grid, (b - a) / 400 * 1e6);
        }
    for (int grid : {128, 132}) {
        auto run = [&](int cnt) {
            return time_graph([&] {
                CK(cudaMemsetAsync(scratch, 0, 4, st));
                barriers<<<grid, 256, 0, st>>>(scratch, cnt);
            }).med;
        };
        printf("grid barrier, %d blocks: %.3f us each\n", grid, (run(2000) - run(500)) / 1500 * 1e6);
    }
    for (int warps : {4, 8, 16}) {
        int n = 20000;
        Stat t = time_graph([&] { mma_rate<<<SMS, warps * 32, 0, st>>>((float*)scratch, n); }, 5);
        printf("mma.m16n8k16 bf16, %d warps/SM: %.0f TFLOP/s\n", warps, 2. * 2048 * 8 * n * warps * SMS / t.med / 1e12);
    }
}

// ------------------------------------------------------------------------------------------------ check
static double rel_err(const std::vector<float>& a, const std::vector<float>& r) {
    double d = 0, n = 0;
    for (size_t i = 0; i < r.size(); i++) d += (double)(a[i] - r[i]) * (a[i] - r[i]), n += (double)r[i] * r[i];
    return std::isfinite(d) ? sqrt(d / n) : INFINITY;
}
static int check() {
    printf("== check (relative L2 error of f32 outputs vs f64; row bits vs the 8-row run)\n");
    int bad = 0, cases = 0;
    double worst = 0;
    unsigned* dcounter;
    CK(cudaMalloc(&dcounter, 4));
    Shape odd = {"odd", 1040, 2880, 1, 0};  // 65 tile rows, 45 groups
    Shape small = {"n1024", 1024, 5120, 1, 0};
    for (const Shape& s : {IN, QKV, OUT, GU, DOWN, odd, small}) {
        uint32_t* w; uint16_t *sc, *bi, *x, *xf; uint8_t* pk; float *y, *ref;
        size_t words = (size_t)s.N * s.K / 8, groups = (size_t)s.N * s.K / 64;
        const int R = 16;
        CK(cudaMalloc(&w, words * 4)); CK(cudaMalloc(&sc, groups * 2)); CK(cudaMalloc(&bi, groups * 2)); CK(cudaMalloc(&x, (size_t)R * s.K * 2)); CK(cudaMalloc(&xf, (size_t)R * s.K * 2));
        CK(cudaMalloc(&y, (size_t)R * s.N * 4)); CK(cudaMalloc(&ref, (size_t)R * s.N * 4));
        fill_mlx<<<1024, 256, 0, st>>>(w, sc, bi, words, groups, 1234 + s.N);
        fill_x<<<256, 256, 0, st>>>(x, (size_t)R * s.K, 99 + s.K);
        reference<<<s.N, 32, 0, st>>>(ref, w, sc, bi, x, s.N, s.K, s.K, R);
        std::vector<float> hr((size_t)R * s.N), h((size_t)R * s.N);
        CK(cudaMemcpyAsync(hr.data(), ref, hr.size() * 4, cudaMemcpyDeviceToHost, st));
        CK(cudaStreamSynchronize(st));
        for (int KW : {8, 16})
            for (int S : {1, 2}) {
                std::vector<float> h8;
                for (auto& k : reg) {
                    if (k.KW != KW || k.DEQ) continue;
                    Placed p = place(s, S, k);
                    if (!p.grid) continue;
                    CK(cudaMalloc(&pk, p.bytes));
                    p.op.w = pk, p.op.x = xf, p.op.y = y, p.op.ldx = s.K / 64, p.op.ldy = s.N, p.op.epi = EPI_F32;
                    CK(cudaMemsetAsync(pk, 0xff, p.bytes, st));
                    to_fragments<<<256, 256, 0, st>>>(xf, x, R, s.K, s.K, s.K / 64, uses_f16(p.op));
                    repack<<<2048, 256, 0, st>>>(pk, w, sc, bi, p.op, k.KW, uses_f16(p.op), 0);
                    auto run = [&](int rows) {
                        CK(cudaMemsetAsync(y, 0xff, (size_t)R * s.N * 4, st));
                        if (k.persistent) {
                            OpList l;
                            l.n = 1, l.op[0] = p.op;
                            launch_persistent(k, l, rows, dcounter);
                        } else launch(k, p.grid, p.op, rows, 0);
                        CK(cudaMemcpyAsync(h.data(), y, h.size() * 4, cudaMemcpyDeviceToHost, st));
                        CK(cudaStreamSynchronize(st));
                        for (size_t i = (size_t)rows * s.N; i < h.size(); i++)
                            if (*(uint32_t*)&h[i] != 0xffffffffu) { printf("FAIL wrote past rows\n"); bad++; break; }
                    };
                    int full = 8 * k.NB, diff = 0;
                    run(full);
                    double e = rel_err(std::vector<float>(h.begin(), h.begin() + (size_t)full * s.N), std::vector<float>(hr.begin(), hr.begin() + (size_t)full * s.N));
                    if (h8.empty()) h8 = h;  // the first kernel of this (KW, S); later ones, of other ring shapes and row counts, must give its bits
                    diff += memcmp(h.data(), h8.data(), (size_t)8 * s.N * 4) != 0;
                    for (int rows : {1, 2, 3, 5, 7, 8, 9, 13, 16}) {
                        if (rows > full) break;
                        run(rows);
                        diff += memcmp(h.data(), h8.data(), (size_t)std::min(rows, 8) * s.N * 4) != 0;
                    }
                    bool ok = e < 2e-5 && !diff;
                    if (!ok) bad++, printf("%-8s N%6d K%6d S%d %-20s: error %.1e, row-bit diffs %d FAIL\n", s.name, s.N, s.K, S, k.name, e, diff);
                    worst = std::max(worst, e), cases++;
                    CK(cudaFree(pk));
                }
            }
        CK(cudaFree(w)); CK(cudaFree(sc)); CK(cudaFree(bi)); CK(cudaFree(x)); CK(cudaFree(xf)); CK(cudaFree(y)); CK(cudaFree(ref));
    }
    printf("%d cases, worst error %.2e, %d failures\n", cases, worst, bad);
    return bad;
}

// ------------------------------------------------------------------------------------------------ chains
static uint16_t *bufA, *bufB, *bufC, *bufD, *bufL;
struct Chain { std::vector<Placed> ops; size_t bytes = 0, stored = 0; OpList list; unsigned* counter = nullptr; };
static const size_t WBYTES = (size_t)14600 << 20;
static void push(Chain& c, const Shape& s, int S, const Kern& k, uint8_t* W, const uint16_t* x, int ldx, uint16_t* y, int ldy) {
    Placed p = place(s, S, k);
    if (!p.grid) printf("%s has no code for %s\n", k.name, s.name), exit(1);
    p.op.w = W + c.stored, p.op.x = x, p.op.y = y, p.op.ldx = ldx, p.op.ldy = ldy, p.op.epi = s.glu ? EPI_SWIGLU : EPI_BF16;
    p.op.yf16 = s.N == 248320 ? 0 : ALLF16 || s.N == 5120;  // what the next op reads
    p.op.alpha = 1.f / (0.0479f * sqrtf((float)s.K)) / (s.K == 17408 ? 0.36f : 1.f);
    p.op.limit = 2.f;
    c.bytes += weight_bytes(s), c.stored += p.bytes;
    c.ops.push_back(p);
}
// split bits: 1 = ksplit 2 for the input projections, 2 = for gate/up, 4 = ksplit 1 for out and down
static Chain model_chain(const Kern& k, int split, uint8_t* W) {
    Chain c;
    int si = split & 1 ? 2 : 1, sg = split & 2 ? 2 : 1, so = split & 4 ? 1 : 2;
    for (int l = 0; l < 64; l++) {
        push(c, l % 4 == 3 ? QKV : IN, si, k, W, bufD, 80, bufA, 258);
        push(c, OUT, so, k, W, bufA, 258, bufB, 80);
        push(c, GU, sg, k, W, bufB, 80, bufC, 272);
        push(c, DOWN, so, k, W, bufC, 272, bufD, 80);
    }
    push(c, HEAD, 1, k, W, bufD, 80, bufL, 3880);
    if (c.stored > WBYTES) printf("weights don't fit\n"), exit(1);
    return c;
}
static void run_chain(const Chain& c, const Kern& k, int rows, int pdl) {
    if (k.persistent) {
        launch_persistent(k, c.list, rows, c.counter);
        return;
    }
    for (auto& p : c.ops) launch(k, p.grid, p.op, rows, pdl);
}
static void upload(Chain& c) {
    c.list.n = 0;
    unsigned before = 0;
    for (auto& p : c.ops) {
        c.list.op[c.list.n] = p.op;
        c.list.op[c.list.n++].before = before;
        before += p.op.tiles;
    }
    CK(cudaMalloc(&c.counter, 4));
}
static void report(const char* name, int rows, size_t bytes, int launches, Stat t) {
    double f = bytes / PEAK;
    printf("%-44s rows %2d: %7.3f ms (%.3f..%.3f)  %.3f TB/s  %.3fx floor  %.2f us/op over\n", name, rows, t.med * 1e3, t.lo * 1e3, t.hi * 1e3, bytes / t.med / 1e12, t.med / f,
           (t.med - f) / launches * 1e6);
    fflush(stdout);
}
static std::vector<uint16_t> result(int rows) {  // the logits, natural order
    std::vector<uint16_t> f((size_t)(rows + 7) / 8 * 8 * 248320), h((size_t)rows * 248320);
    CK(cudaMemcpyAsync(f.data(), bufL, f.size() * 2, cudaMemcpyDeviceToHost, st));
    CK(cudaStreamSynchronize(st));
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 248320; k++) h[(size_t)r * 248320 + k] = f[x_index(r, k, 3880)];
    return h;
}
static void reset_x() {
    fill_x<<<64, 256, 0, st>>>(bufD, 64 * 5120, 4242);
    CK(cudaMemsetAsync(bufL, 0xff, (size_t)64 * 248320 * 2, st));
}
static void chain_one(uint8_t* W, const char* name, int split, int rows, int pdl) {
    const Kern& k = kern(name);
    Chain c = model_chain(k, split, W);
    upload(c);
    char nm[128];
    snprintf(nm, 128, "%s%s split%d", name, k.persistent ? "" : pdl ? " PDL" : " plain", split);
    report(nm, rows, c.bytes, (int)c.ops.size(), time_graph([&] { run_chain(c, k, rows, pdl); }));
    if (k.DEQ != 2) {  // bits of the whole chain: graph against eager plain launches of the same partition, and row invariance
        static std::map<std::tuple<int, int>, std::vector<uint16_t>> seen;
        reset_x();
        cudaGraphExec_t e = capture([&] { run_chain(c, k, rows, pdl); });
        CK(cudaGraphLaunch(e, st));
        auto a = result(rows);
        CK(cudaGraphExecDestroy(e));
        std::tuple<int, int> key(k.KW, split);
        auto it = seen.find(key);
        if (it == seen.end()) seen[key] = a;
        else {
            size_t n = std::min(a.size(), it->second.size());
            if (memcmp(a.data(), it->second.data(), n * 2)) printf("BITS DIFFER from the first chain of this partition\n");
            if (a.size() > n) it->second = a;
        }
        int nan = 0; double mag = 0;
        for (auto v : a) { uint32_t u = (uint32_t)v << 16; float f = *(float*)&u; if (!std::isfinite(f)) nan++; else mag += fabs(f); }
        mag /= a.size();
        if (nan || mag < 1e-3) printf("chain output suspicious: %d non-finite, mean %.3g\n", nan, mag);
    }
    CK(cudaFree(c.counter));
}
static void chains(uint8_t* W) {
    printf("== chains: 64 layers x 4 matmuls + head = 257 matmuls, distinct weights, floor %.3f ms\n", model_chain(kern("16w"), 0, W).bytes / PEAK * 1e3);
    for (int rows : {8, 1}) {
        for (auto n : {"P 8w", "P 16w"}) chain_one(W, n, 0, rows, 0);
        for (auto n : {"16w stream", "16w", "8w"})
            for (int pdl : {0, 1}) chain_one(W, n, 0, rows, pdl);
    }
    for (int rows : {2, 4, 6}) chain_one(W, "16w", 0, rows, 1);
}
static void rates(uint8_t* W) {  // the consumer alone: nothing waits, nothing is streamed
    printf("== consumer rates: cycles per tile and quarter SM at 1.98 GHz (memory at 4.6 TB/s allows 131)\n");
    for (auto n : {"16w compute"})
        for (const Shape& s : {GU, IN, OUT, DOWN}) {
            const Kern& k = kern(n);
            Placed p = place(s, s.S, k);
            p.op.w = W, p.op.x = bufA, p.op.y = bufC, p.op.ldx = 272, p.op.ldy = 544, p.op.epi = s.glu ? EPI_SWIGLU : EPI_BF16;
            double t1 = time_graph([&] { for (int i = 0; i < 20; i++) launch(k, p.grid, p.op, 8 * k.NB, 0); }, 5).med / 20;
            int m = p.op.sshift ? 1 : 4;  // four times the tiles, the same prologue and epilogue
            double t4 = t1;
            if (m > 1) {
                p.op.tiles *= m, p.op.run_fix *= m, p.op.y = bufL, p.op.ldy = 4000;
                t4 = time_graph([&] { for (int i = 0; i < 20; i++) launch(k, p.grid, p.op, 8 * k.NB, 0); }, 5).med / 20;
            }
            double tiles = (double)s.N / 16 * p.op.groups / SMS;
            if (m > 1) printf("%-16s %-8s %.2f us once, %.2f us for 4x: %.1f cycles/cell, fixed part %.2f us\n", n, s.name, t1 * 1e6, t4 * 1e6, (t4 - t1) / 3 / tiles * 4 * 1.98e9, (t1 - (t4 - t1) / 3) * 1e6);
            else printf("%-16s %-8s %.2f us: %.1f cycles/cell with everything\n", n, s.name, t1 * 1e6, t1 / tiles * 4 * 1.98e9);
        }
}
static void asym(uint8_t* W) {
    printf("== long matmuls (K x 8): TB/s without the fixed part\n");
    for (auto n : {"16w stream", "16w"})
        for (const Shape& s : {GU, IN}) {
            const Kern& k = kern(n);
            Placed p = place(s, s.S, k);
            p.op.w = W, p.op.x = bufA, p.op.y = bufL, p.op.ldx = 80, p.op.ldy = 10000, p.op.epi = EPI_BF16;
            auto t = [&](int m) {
                Op o = p.op;
                o.tiles *= m, o.run_fix *= m;
                return time_graph([&] { for (int i = 0; i < 4; i++) o.w = W + (size_t)i * 3 * 1000 * 1000 * 1008, launch(k, p.grid, o, 8, 0); }, 5).med / 4;
            };
            double a = t(4), b = t(7);
            printf("%-14s %-8s %.3f TB/s (fixed %.2f us)\n", n, s.name, (double)p.bytes * 3 / (b - a) / 1e12, (a - 4 * (b - a) / 3) * 1e6);
        }
}
#ifdef TRACE
static void trace(uint8_t* W) {
    long long* d;
    size_t n = (size_t)300 * 132 * 16;
    CK(cudaMalloc(&d, n * 8));
    CK(cudaMemcpyToSymbol(g_trace, &d, sizeof(d)));
    std::vector<long long> h(n);
    for (auto name : {"P 8w", "P 16w"}) {
        const Kern& k = kern(name);
        Chain c = model_chain(k, 0, W);
        upload(c);
        for (int i = 0; i < 3; i++) run_chain(c, k, 8, 0);
        CK(cudaMemcpyAsync(h.data(), d, n * 8, cudaMemcpyDeviceToHost, st));
        CK(cudaStreamSynchronize(st));
        printf("== trace %s, 8 rows: mean ns (max over blocks) at 1.98 GHz, for warp 0 and the last warp\n", name);
        const char* what[4] = {"in", "out", "gate_up", "down"};
        for (int q = 0; q < 4; q++)
            for (int wv = 0; wv < 2; wv++) {
                double m[8] = {}, mx[8] = {}; int cnt = 0;
                for (int op = 8 + q; op < 240; op += 4) {
                    double top[8] = {};
                    for (int b = 0; b < 132; b++) {
                        long long* t = &h[(((size_t)op * 132 + b) * 2 + wv) * 8];
                        long long* pr = &h[(((size_t)(op - 1) * 132 + b) * 2 + wv) * 8];
                        double v[7] = {(double)(t[0] - pr[5]), (double)(t[1] - t[0]), (double)(t[2] - t[1]), (double)(t[3] - t[2]), (double)(t[5] - t[3]), 0, 0};
                        for (int i = 0; i < 7; i++) m[i] += v[i] / 1.98, top[i] = std::max(top[i], v[i] / 1.98);
                        m[7] += (t[5] - pr[5]) / 1.98;
                        cnt++;
                    }
                    for (int i = 0; i < 7; i++) mx[i] += top[i];
                }
                int ops = cnt / 132;
                printf("%-8s w%d: refill and grid wait %.0f (%.0f) | activations %.0f (%.0f) | tiles %.0f (%.0f) | last tile's sum %.0f (%.0f) | rest %.0f (%.0f) | total %.0f\n", what[q], wv, m[0] / cnt, mx[0] / ops,
                       m[1] / cnt, mx[1] / ops, m[2] / cnt, mx[2] / ops, m[3] / cnt, mx[3] / ops, m[4] / cnt, mx[4] / ops, m[7] / cnt);
            }
        CK(cudaFree(c.counter));
    }
}
#endif
// Issue rates of single instructions, 8 warps per quarter SM.
template <int OP>
__global__ void pipe_rate(uint32_t* out, int n, uint32_t c, uint32_t d) {
    uint32_t a[8];
    for (int i = 0; i < 8; i++) a[i] = threadIdx.x * 77 + i;
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int u = 0; u < 4; u++)
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (OP == 0) asm volatile("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(a[k]) : "r"(c), "r"(d));
            if (OP == 1) asm volatile("shf.r.wrap.b32 %0, %0, %0, 12;" : "+r"(a[k]));
            if (OP == 2) asm volatile("shr.u32 %0, %0, 4;" : "+r"(a[k]));
            if (OP == 3) asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(a[k]) : "r"(c));
            if (OP == 4) asm volatile("{.reg .u64 t; mul.wide.u32 t, %0, %1; mov.b64 {_, %0}, t;}" : "+r"(a[k]) : "r"(c));
            if (OP == 5) asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(a[k]) : "r"(c), "r"(d));
            if (OP == 6) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(a[k]) : "r"(c), "r"(d));
            if (OP == 7) asm volatile("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a[k]) : "r"(c), "r"(d));
            if (OP == 8) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(*(float*)&a[k]) : "f"(__uint_as_float(c)), "f"(__uint_as_float(d)));
            if (OP == 9) {  // lop3 and fma.bf16x2 alternating
                if (k & 1) asm volatile("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a[k]) : "r"(c), "r"(d));
                else asm volatile("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(a[k]) : "r"(c), "r"(d));
            }
            if (OP == 10) {  // lop3 and mul.hi alternating
                if (k & 1) asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(a[k]) : "r"(c));
                else asm volatile("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(a[k]) : "r"(c), "r"(d));
            }
        }
    uint32_t s = 0;
    for (int i = 0; i < 8; i++) s ^= a[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = s;
}
template <int OP>
static void pipe(uint32_t* scratch, const char* name) {
    int n = 2000;
    double t = time_graph([&] { pipe_rate<OP><<<SMS, 1024, 0, st>>>(scratch, n, 0x01000000u, 0x3f803f80u); }, 5).med;
    printf("%-28s %.2f cycles per warp instruction and quarter SM\n", name, t * 1.98e9 / (n * 32.0 * 8));
}
static void pipes(uint32_t* s) {
    pipe<0>(s, "lop3"); pipe<1>(s, "shf.wrap"); pipe<2>(s, "shr"); pipe<3>(s, "mul.hi"); pipe<4>(s, "mul.wide high half"); pipe<5>(s, "mad.lo"); pipe<6>(s, "prmt"); pipe<7>(s, "fma.bf16x2");
    pipe<8>(s, "fma.f32"); pipe<9>(s, "lop3 + fma.bf16x2"); pipe<10>(s, "lop3 + mul.hi");
}
static void prof(uint8_t* W) {
    for (int i = 0; i < 2; i++)
        for (auto n : {"16w", "16w compute"}) {
            const Kern& k = kern(n);
            Placed p = place(GU, 1, k);
            p.op.w = W + i * ((size_t)1 << 30), p.op.x = bufA, p.op.y = bufC, p.op.ldx = 80, p.op.ldy = 272, p.op.epi = EPI_SWIGLU;
            launch(k, p.grid, p.op, 8, 0);
        }
    CK(cudaStreamSynchronize(st));
}
static void shapes(uint8_t* W) {
    printf("== one shape repeated over distinct weights, 8 rows (time per matmul)\n");
    for (const Shape& s : {IN, QKV, OUT, GU, DOWN})
        for (int S : {1, 2}) {
            printf("%-8s S%d floor %6.2f us:", s.name, S, weight_bytes(s) / PEAK * 1e6);
            for (auto n : {"P 16w", "16w", "16w stream"}) {
                const Kern& k = kern(n);
                if (!place(s, S, k).grid) continue;
                Chain c;
                int cnt = (int)std::min<size_t>(200, ((size_t)6 << 30) / weight_bytes(s));
                for (int i = 0; i < cnt; i++) push(c, s, S, k, W, i & 1 ? bufC : bufA, 544, i & 1 ? bufA : bufC, 544);
                upload(c);
                double t = time_graph([&] { run_chain(c, k, 8, 1); }, 7).med;
                printf("  %s %.2f (%.3fx)", n, t / cnt * 1e6, t / (c.bytes / PEAK));
                CK(cudaFree(c.counter));
            }
            printf("\n");
        }
}

int main(int argc, char** argv) {
    setvbuf(stdout, 0, _IOLBF, 0);
    CK(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
    cudaDeviceProp pr;
    CK(cudaGetDeviceProperties(&pr, 0));
    SMS = pr.multiProcessorCount;
    printf("%s, %d SMs, L2 %d MB, smem/block %zu\n", pr.name, SMS, pr.l2CacheSize >> 20, pr.sharedMemPerBlockOptin);
    build_registry();
    if (argc > 1 && !strcmp(argv[1], "info"))
        for (auto& k : reg) {
            int nb = 0;
            CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&nb, k.fn, k.threads, k.smem));
            cudaFuncAttributes fa;
            CK(cudaFuncGetAttributes(&fa, k.fn));
            printf("kernel %-22s %d regs, %d B local, %d B smem, %d threads, %d blocks/SM\n", k.name, fa.numRegs, (int)fa.localSizeBytes, k.smem, k.threads, nb);
        }
    size_t wbytes = WBYTES;
    uint8_t* W; uint32_t* scratch;
    CK(cudaMalloc(&W, wbytes)); CK(cudaMalloc(&scratch, 1 << 22));
    CK(cudaMemset(scratch, 0, 1 << 22));
    CK(cudaMalloc(&bufA, 64 * 17408 * 8)); CK(cudaMalloc(&bufB, 64 * 17408 * 2)); CK(cudaMalloc(&bufC, 64 * 17408 * 2)); CK(cudaMalloc(&bufD, 64 * 17408 * 2));
    CK(cudaMalloc(&bufL, (size_t)128 * 248320 * 2));
    fill_packed<<<SMS * 16, 256, 0, st>>>(W, wbytes / CELL, 17);
    for (uint16_t* b : {bufA, bufB, bufC, bufD}) fill_x<<<64, 256, 0, st>>>(b, 64 * 17408, 7);
    CK(cudaStreamSynchronize(st));
    int bad = 0;
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        if (a == "micro") micro(W, wbytes, scratch);
        if (a == "check") bad += check();
        if (a == "chain") chains(W);
        if (a == "shapes") shapes(W);
        if (a == "rates") rates(W);
        if (a == "prof") prof(W);
        if (a == "asym") asym(W);
        if (a == "pipes") pipes(scratch);
#ifdef TRACE
        if (a == "trace") trace(W);
#endif
        CK(cudaDeviceSynchronize());
    }
    printf("done, %d failures\n", bad);
    return bad != 0;
}
