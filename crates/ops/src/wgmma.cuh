// Hopper's matrix units: products that four warps start together and that run while they do other things. After
// prelude.cuh.
//
// Between `wgmma_fence` and `wgmma_commit` products are started; up to the `wgmma_wait` that says that they are done
// nothing may touch their results and register operands. `keep` holds those in their registers until there.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most N of the committed groups of products are not done.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void keep(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void keep(u32 (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Operands in shared memory lie in panels of 64 columns, at multiples of 1024: 128 bytes of each row, whose 16-byte
// pieces are permuted (a "swizzle of 128 bytes"). Here: of a panel's byte.
__device__ __forceinline__ u32 panel_at(u32 row, u32 piece) {
    return row * 128 + (piece ^ row % 8) * 16;
}
// An operand whose rows run along the sum, from byte `at` on: 16 columns are 32 bytes.
__device__ __forceinline__ u64 rows_along(u32 at) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | at >> 4;
}
// One whose rows run across the sum, in panels that are `panel` bytes apart: 16 rows are 2048 bytes.
__device__ __forceinline__ u64 rows_across(u32 at, u32 panel) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(panel >> 4) << 16 | at >> 4;
}

// d (64 x N, f32) += a (64 x 16, brain floats) b (16 x N); zeroes d first unless `more`. A warp has 16 rows of d and a, in the
// layout of `mma_bf16`. b lies in shared memory, with rows across the sum if ACROSS. The last seven numbers
// are those of operands.
#define WGMMA(N, SUMS, PLACES, RESULTS, A0, A1, A2, A3, B, MORE, TRANSPOSED)                                         \
    template <int ACROSS = 0>                                                                                       \
    __device__ __forceinline__ void wgmma(float (&d)[SUMS], const u32 (&a)[4], u64 b, u32 more) {                   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %" #MORE ", 0;\n"                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, "                      \
                     "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TRANSPOSED ";\n}\n"           \
                     : RESULTS                                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more), "n"(ACROSS));                 \
    }
#define RESULTS_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define RESULTS_16(i) RESULTS_8(i), RESULTS_8(i + 8)
#define RESULTS_32(i) RESULTS_16(i), RESULTS_16(i + 16)
#define RESULTS_64(i) RESULTS_32(i), RESULTS_32(i + 32)
#define ALL(...) __VA_ARGS__
#define PLACES_8 \
    "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_16 PLACES_8 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_24 PLACES_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PLACES_32 PLACES_24 \
    ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_48 PLACES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_64 PLACES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_80 PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
WGMMA(16, 8, PLACES_8, RESULTS_8(0), 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, 16, PLACES_16, RESULTS_16(0), 16, 17, 18, 19, 20, 21, 22)
WGMMA(48, 24, PLACES_24, ALL(RESULTS_16(0), RESULTS_8(16)), 24, 25, 26, 27, 28, 29, 30)
WGMMA(64, 32, PLACES_32, RESULTS_32(0), 32, 33, 34, 35, 36, 37, 38)
WGMMA(96, 48, PLACES_48, ALL(RESULTS_32(0), RESULTS_16(32)), 48, 49, 50, 51, 52, 53, 54)
WGMMA(128, 64, PLACES_64, RESULTS_64(0), 64, 65, 66, 67, 68, 69, 70)
WGMMA(160, 80, PLACES_80, ALL(RESULTS_64(0), RESULTS_16(64)), 80, 81, 82, 83, 84, 85, 86)

// With a in shared memory too, rows of both along the sum.
__device__ __forceinline__ void wgmma(float (&d)[32], u64 a, u64 b, u32 more) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(more));
}
#endif
