// What every kernel may use. NVRTC compiles without headers, so this needs none.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef int i32;
typedef long long i64;

#define PAGE_TOKENS 64
#define WARP_ALL 0xffffffffu
#define NEG_INF __int_as_float(0xff800000)

// One lane's share of a pass: `LaneStep` in step.rs.
struct LaneStep {
    u32 row0, rows, pos, slot, pending, parity, reserved[2];
};

// Waits until the launch before this one is complete and its writes are visible. Everything that
// is not a weight is read and written after it.
__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start its blocks as this one's finish; it still waits for the end of this one.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Brain floats, stored as u16; rounds to nearest even, as `half::bf16`.
__device__ __forceinline__ float bf16_to_f32(u16 b) {
    return __uint_as_float((u32)b << 16);
}
__device__ __forceinline__ u16 f32_to_bf16(float x) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(x));
    return b;
}
// Two in a word: lo in the lower half.
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}

// IEEE halves, stored as u16.
__device__ __forceinline__ float f16_to_f32(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
__device__ __forceinline__ u16 f32_to_f16(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

// Sum over a warp in one fixed order; every lane gets it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(WARP_ALL, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(WARP_ALL, x, d));
    return x;
}

// Activation rows (`Act` in act.rs): bf16 or f32, chosen by the define ACT_BF16 of a launch.
template <int BF16> __device__ __forceinline__ float act_load(const void* row, u32 i) {
    if constexpr (BF16) return bf16_to_f32(((const u16*)row)[i]);
    else return ((const float*)row)[i];
}
template <int BF16> __device__ __forceinline__ void act_store(void* row, u32 i, float x) {
    if constexpr (BF16) ((u16*)row)[i] = f32_to_bf16(x);
    else ((float*)row)[i] = x;
}
// Four neighbours; i is a multiple of 4.
template <int BF16> __device__ __forceinline__ float4 act_load4(const void* row, u32 i) {
    if constexpr (BF16) {
        uint2 w = *(const uint2*)((const u16*)row + i);
        return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
                           __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u));
    } else {
        return *(const float4*)((const float*)row + i);
    }
}
template <int BF16> __device__ __forceinline__ void act_store4(void* row, u32 i, float4 x) {
    if constexpr (BF16)
        *(uint2*)((u16*)row + i) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
    else
        *(float4*)((float*)row + i) = x;
}

// A lane's step, also before `wait()`: past the first-level cache, which may hold that of the pass before.
__device__ __forceinline__ LaneStep step_of(const LaneStep* steps, u32 lane) {
    const uint4* words = (const uint4*)(steps + lane);
    uint4 low = __ldcg(words), high = __ldcg(words + 1);
    return {low.x, low.y, low.z, low.w, high.x, high.y, {high.z, high.w}};
}

// The lane that `row` of a pass belongs to; `count` for none. All threads of a warp ask for one row. Also before `wait()`.
__device__ __forceinline__ u32 lane_of(const LaneStep* steps, u32 count, u32 row) {
    for (u32 first = 0; first < count; first += 32) {
        u32 l = first + threadIdx.x % 32;
        bool mine = l < count && row - __ldcg(&steps[l].row0) < __ldcg(&steps[l].rows);
        u32 found = __ballot_sync(WARP_ALL, mine);
        if (found) return first + __ffs(found) - 1;
    }
    return count;
}

// x / (1 + e^-x); no overflow at either end.
__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

// 2^x, to two units in the last place; subnormal results are kept.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two halves in a word: lo in the lower half. Values beyond the range become the largest half.
__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
    u32 w;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}

// ---- Shared memory ----------------------------------------------------------------------------

// The address that instructions on shared memory take.
__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Four 8x8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i. Lane 4g + t
// gets elements 2t and 2t + 1 of row g; transposed: rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// `__syncthreads` for `threads` of the block's threads. Barrier 0 is that of `__syncthreads`.
__device__ __forceinline__ void barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 16 bytes from global to shared memory in the background; of `bytes` < 16, the rest is zeros.
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most N of the thread's groups of copies are not done.
template <int N>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Barriers in shared memory: 8 bytes each. A phase ends when `count` arrivals and all announced
// bytes are there.
__device__ __forceinline__ void phase_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// After `phase_init`, before other threads and copies use the barriers.
__device__ __forceinline__ void phase_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void phase_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void phase_arrive_expecting(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// One of the arrivals that the barrier was made for, as soon as the thread's `copy16`s so far are done.
__device__ __forceinline__ void phase_arrive_copied(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Until the phase of this parity is over.
__device__ __forceinline__ void phase_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// The same where blocks of the cluster arrive.
__device__ __forceinline__ void phase_wait_cluster(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// A place in shared memory, in another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 at, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Bytes from global to shared memory by the copy engine; counted by `bar`. Multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}
// The policy of what is read once, and such a copy.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_copy_once(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
#endif

// ---- Matrix units -----------------------------------------------------------------------------

// d (16x8) += a (16x16) b (16x8). Lane 4g + t holds of d: rows g and g + 8 (elements 0, 1 and 2, 3),
// columns 2t and 2t + 1; of a: words (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); of b: words (2t, g)
// and (2t + 8, g), two neighbours along the sum in a word.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Between this thread's accesses to shared memory and the copy engine's or a matrix unit's later ones.
__device__ __forceinline__ void fence_shared_async() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
