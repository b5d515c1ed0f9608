// How fast can every SM take in the same activations (8 rows x 5120 = 80 KB, resident in L2)?
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cuda_runtime.h>
#include "ptx.cuh"
#define CK(e) do { cudaError_t e_ = (e); if (e_ != cudaSuccess) { printf("CUDA error %s at %d\n", cudaGetErrorString(e_), __LINE__); exit(1); } } while (0)
__global__ void touch(uint4* p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = make_uint4(i, 1, 2, 3);
}
__device__ __forceinline__ uint4 ldcg(const void* a) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(a) : "memory");
    return v;
}
__device__ __forceinline__ void sync_all(unsigned* c, unsigned want) {  // rough common start
    __syncthreads();
    if (threadIdx.x == 0) {
        red_release(c);
        while (ld_acquire(c) < want) {}
    }
    __syncthreads();
}
// N 16-byte loads a lane; mode 0 straight, 1 rotated by block (in units of the warp's own chunk), 2 .cg, 3 copies
template <int N, int MODE, int LANES>
__global__ void __launch_bounds__(512) ldg(const char* x, unsigned* c, long long* out, uint32_t* sink, int bytes) {
    sync_all(c, gridDim.x);
    long long t0 = clock64();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const char* p = x + (size_t)warp * N * 512 + lane * 16 + (MODE == 3 ? (blockIdx.x & 7) * (size_t)(1 << 20) : 0);
    uint4 v[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        int k = MODE == 1 ? (i + blockIdx.x) % N : i;
        v[i] = make_uint4(0, 0, 0, 0);
        if (lane < LANES) v[i] = MODE == 2 ? ldcg(p + k * 512) : ldx128(p + k * 512);
    }
    uint32_t a = 0;
#pragma unroll
    for (int i = 0; i < N; i++) a ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    if (a == 0x1234567) sink[0] = a;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = clock64() - t0;
}
// bulk copies by one lane of each of `W` warps; mode 0 straight, 1 rotated, 2 copies
__global__ void bulk(const char* x, unsigned* c, long long* out, int total, int chunk, int mode) {
    extern __shared__ __align__(128) char smem[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, W = blockDim.x >> 5;
    uint32_t bar = smem_addr(smem), dst = bar + 128;
    if (threadIdx.x == 0) mbar_init(bar, W), mbar_init_fence();
    sync_all(c, gridDim.x);
    long long t0 = clock64();
    int n = total / chunk;
    if (lane == 0) {
        uint64_t pol;
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(pol));
        int mine = 0;
        for (int i = warp; i < n; i += W) mine++;
        mbar_expect(bar, mine * chunk);
        for (int i = warp; i < n; i += W) {
            int k = mode == 1 ? (i + blockIdx.x * 3) % n : i;
            bulk_load(dst + k * chunk, x + (size_t)k * chunk + (mode == 2 ? (blockIdx.x & 7) * (size_t)(1 << 20) : 0), chunk, bar, pol);
        }
    }
    mbar_wait(bar, 0);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = clock64() - t0;
}
// multicast: each block of a cluster of C fetches 1/C of the bytes for all
__global__ void multicast(const char* x, unsigned* c, long long* out, int total, int chunk, int C) {
    extern __shared__ __align__(128) char smem[];
    uint32_t bar = smem_addr(smem), dst = bar + 128;
    if (threadIdx.x == 0) mbar_init(bar, 1), mbar_init_fence();
    __syncthreads();
    cluster_arrive(); cluster_wait();
    sync_all(c, gridDim.x);
    long long t0 = clock64();
    int n = total / chunk, r = cluster_rank();
    if (threadIdx.x == 0) {
        mbar_expect(bar, total);
        for (int i = r; i < n; i += C)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(dst + i * chunk), "l"(x + (size_t)i * chunk), "r"(chunk), "r"(bar), "h"((uint16_t)((1 << C) - 1)) : "memory");
    }
    mbar_wait(bar, 0);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = clock64() - t0;
    cluster_arrive(); cluster_wait();
}
static long long* dout; static unsigned* dc; static char* x; static uint32_t* sink;
template <class F> void run(const char* name, int grid, F f) {
    std::vector<double> mean, mx;
    std::vector<long long> h(grid);
    for (int r = 0; r < 9; r++) {
        touch<<<132, 256>>>((uint4*)x, (8u << 20) / 16);  // as if an earlier kernel had just written it
        CK(cudaMemset(dc, 0, 4));
        f();
        CK(cudaMemcpy(h.data(), dout, grid * 8, cudaMemcpyDeviceToHost));
        CK(cudaGetLastError());
        double s = 0, m = 0;
        for (auto v : h) s += v, m = std::max(m, (double)v);
        mean.push_back(s / grid / 1.98), mx.push_back(m / 1.98);
    }
    std::sort(mean.begin(), mean.end()); std::sort(mx.begin(), mx.end());
    printf("%-48s mean %.0f ns, slowest block %.0f ns\n", name, mean[4], mx[4]);
}
int main() {
    CK(cudaMalloc(&x, 16 << 20)); CK(cudaMalloc(&dout, 8 * 1024)); CK(cudaMalloc(&dc, 4)); CK(cudaMalloc(&sink, 4));
    CK(cudaFuncSetAttribute(bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024)); CK(cudaFuncSetAttribute(multicast, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    run("80 KB LDG 8 warps x 20", 132, [] { ldg<20, 0, 32><<<132, 256>>>(x, dc, dout, sink, 0); });
    run("80 KB LDG 8 warps x 20 rotated", 132, [] { ldg<20, 1, 32><<<132, 256>>>(x, dc, dout, sink, 0); });
    run("80 KB LDG.cg 8 warps x 20", 132, [] { ldg<20, 2, 32><<<132, 256>>>(x, dc, dout, sink, 0); });
    run("80 KB LDG 8 warps x 20, 8 copies", 132, [] { ldg<20, 3, 32><<<132, 256>>>(x, dc, dout, sink, 0); });
    run("80 KB LDG 16 warps x 10", 132, [] { ldg<10, 0, 32><<<132, 512>>>(x, dc, dout, sink, 0); });
    run("80 KB LDG 16 warps x 10, 1 block only", 1, [] { ldg<10, 0, 32><<<1, 512>>>(x, dc, dout, sink, 0); });
    run("40 KB LDG 8 warps x 10", 132, [] { ldg<10, 0, 32><<<132, 256>>>(x, dc, dout, sink, 0); });
    run("10 KB (1 row) LDG 8 warps x 20, 4 lanes", 132, [] { ldg<20, 0, 4><<<132, 256>>>(x, dc, dout, sink, 0); });
    for (int chunk : {2048, 5120, 10240, 20480})
        for (int W : {1, 8}) {
            char nm[96];
            for (int mode = 0; mode < 3; mode++) {
                snprintf(nm, 96, "80 KB bulk, %d B x %d warps %s", chunk, W, mode == 1 ? "rotated" : mode == 2 ? "8 copies" : "");
                run(nm, 132, [&] { bulk<<<132, W * 32, 90 * 1024>>>(x, dc, dout, 81920, chunk, mode); });
            }
        }
    run("10 KB bulk (1 row), 10240 B", 132, [&] { bulk<<<132, 32, 90 * 1024>>>(x, dc, dout, 10240, 10240, 0); });
    run("136 KB bulk, 17408 B x 8", 132, [&] { bulk<<<132, 256, 160 * 1024>>>(x, dc, dout, 139264, 17408, 0); });
    for (int C : {2, 4})
        for (int chunk : {2048, 5120, 10240}) {
            char nm[96];
            snprintf(nm, 96, "80 KB bulk multicast, clusters of %d, %d B", C, chunk);
            int grid = C == 4 ? 120 : 132;
            run(nm, grid, [&] {
                cudaLaunchConfig_t c = {};
                c.gridDim = dim3(grid), c.blockDim = dim3(32), c.dynamicSmemBytes = 130 * 1024;
                cudaLaunchAttribute at[1];
                at[0].id = cudaLaunchAttributeClusterDimension, at[0].val.clusterDim = {(unsigned)C, 1, 1};
                c.attrs = at, c.numAttrs = 1;
                CK(cudaLaunchKernelEx(&c, multicast, (const char*)x, dc, dout, 81920, chunk, C));
            });
        }
    printf("done\n");
}
