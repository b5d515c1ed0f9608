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

// Four elements from `at` on, as far as they are below `end`; the others are `filler`.
template <class T, class T4>
__device__ __forceinline__ T4 load4(const T *row, u32 at, u32 end, bool aligned, T filler) {
    if (aligned && at + 4 <= end) return *(const T4 *)(row + at);
    T4 v = {filler, filler, filler, filler};
    if (at < end) v.x = row[at];
    if (at + 1 < end) v.y = row[at + 1];
    if (at + 2 < end) v.z = row[at + 2];
    if (at + 3 < end) v.w = row[at + 3];
    return v;
}
__device__ __forceinline__ bool aligned16(const void *p) {
    return ((u64)p & 15) == 0;
}
