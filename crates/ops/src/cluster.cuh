// For ops that share a row between the blocks of a cluster.

// A number that orders like the float; NaN aside. Not 0 for any number.
__device__ __forceinline__ u32 ordered(float x) {
    u32 b = __float_as_uint(x);
    return b ^ ((u32)((i32)b >> 31) | 0x80000000u);
}
__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key ^ ((u32)(~(i32)key >> 31) | 0x80000000u));
}

// Clusters of `parts` blocks along x; a lone block where there are none.

// Waits for all threads of the cluster; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void cluster_sync(u32 parts) {
#if __CUDA_ARCH__ >= 900
    if (parts > 1) {
        asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

#if __CUDA_ARCH__ >= 900
// The address of a shared variable in another block of the cluster. Of a lone block, its own.
__device__ __forceinline__ u32 peer(const void *shared, u32 part) {
    u32 address = (u32)__cvta_generic_to_shared(shared);
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(part));
    return address;
}
#endif

// Reads, writes and adds to a shared variable of another block.
__device__ __forceinline__ u64 peer_get(const u64 *shared, u32 part) {
#if __CUDA_ARCH__ >= 900
    u64 value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(peer(shared, part)) : "memory");
    return value;
#else
    return *shared;
#endif
}
__device__ __forceinline__ u32 peer_get(const u32 *shared, u32 part) {
#if __CUDA_ARCH__ >= 900
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(peer(shared, part)) : "memory");
    return value;
#else
    return *shared;
#endif
}
__device__ __forceinline__ void peer_put(u64 *shared, u32 part, u64 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer(shared, part)), "l"(value) : "memory");
#else
    *shared = value;
#endif
}
__device__ __forceinline__ u32 peer_add(u32 *shared, u32 part, u32 value) {
#if __CUDA_ARCH__ >= 900
    u32 before;
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "r"(peer(shared, part)), "r"(value) : "memory");
    return before;
#else
    return atomicAdd(shared, value);
#endif
}

__device__ __forceinline__ bool aligned16(const void *p) {
    return ((u64)p & 15) == 0;
}

// N times four neighbours from `at` on, 128 apart, as far as they are below `end`; fillers behind.
template <class T, class T4, int N>
struct Quads {
    T4 v[N];
    Quads() = default;
    __device__ __forceinline__ Quads(const T *row, u32 at, u32 end, T filler = T(0)) {
        if (aligned16(row) && at + 128 * (N - 1) + 4 <= end) {
#pragma unroll
            for (u32 u = 0; u < N; u++) v[u] = *(const T4 *)(row + at + 128 * u);
        } else {
#pragma unroll
            for (u32 u = 0; u < N; u++) {
                const T *p = row + at + 128 * u;
                i32 left = (i32)end - (i32)(at + 128 * u);
                v[u].x = left > 0 ? p[0] : filler;
                v[u].y = left > 1 ? p[1] : filler;
                v[u].z = left > 2 ? p[2] : filler;
                v[u].w = left > 3 ? p[3] : filler;
            }
        }
    }
};
