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

// The lane that `row` of a pass belongs to; `count` for none. All threads of a warp ask for one row.
__device__ __forceinline__ u32 lane_of(const LaneStep* steps, u32 count, u32 row) {
    for (u32 first = 0; first < count; first += 32) {
        u32 l = first + threadIdx.x % 32;
        bool mine = l < count && row - steps[l].row0 < steps[l].rows;
        u32 found = __ballot_sync(WARP_ALL, mine);
        if (found) return first + __ffs(found) - 1;
    }
    return count;
}

// x / (1 + e^-x); no overflow at either end.
__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}
