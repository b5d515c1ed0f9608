// The instructions of the matrix kernels, and codes as they lie in memory (after weight.cuh).

// D (16 x 8, f32) += A (16 x 16, bf16) B (16 x 8, bf16). Lane 4 g + t: A has rows g and g + 8, columns
// 2 t, 2 t + 1 (a0, a1) and 8 more (a2, a3); B has column g; D has (g, 2 t), (g, 2 t + 1), (g + 8, ...).
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two 16 x 8 matrices B: lane 8 i + r has the address of 8 inputs of row r, those of quarter i.
__device__ __forceinline__ void load_matrices(u32 (&b0)[2], u32 (&b1)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b0[0]), "=r"(b0[1]), "=r"(b1[0]), "=r"(b1[1])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {  // each half; -0 leaves signs alone
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

// The codes and scales of one lane for one unit of 64 inputs and 16 outputs, as they lie in memory.
#define SUBS (GROUP < 64 ? 64 / GROUP : 1)
#define HEADERS (64 / UNIT)
#define HEADER_WORDS (KINDS * SCALE_BYTES / 2)
struct Unit {
    u32 code[4 * STEP_BYTES / 4];
    u32 scale[HEADERS * HEADER_WORDS + (SCALE == 3 ? SUBS : 0)];
};

// A unit, unit `within` of a span: where its first header is, and the codes behind that.
__device__ __forceinline__ void load_unit(Unit& w, const u8* at, const u8* codes, u32 within, u32 lane) {
    const u32 g = lane / 4;
#pragma unroll
    for (int h = 0; h < HEADERS; h++) {
        const u32* header = (const u32*)(at + h * SPAN_BYTES) + g * HEADER_WORDS;
        u32* to = w.scale + h * HEADER_WORDS;
        if constexpr (HEADER_WORDS == 1) to[0] = header[0];
        if constexpr (HEADER_WORDS == 2) { const uint2 v = *(const uint2*)header; to[0] = v.x, to[1] = v.y; }
        if constexpr (HEADER_WORDS == 4) { const uint4 v = *(const uint4*)header; to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }
    }
    if constexpr (SCALE == 3) {
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
            const u8* sub = at + SUB_AT + ((within * SUBS + s) * 16 + 2 * g) * KINDS;
            if constexpr (SYMMETRIC) w.scale[HEADER_WORDS + s] = *(const u16*)sub;
            else w.scale[HEADER_WORDS + s] = *(const u32*)sub;
        }
    }
#pragma unroll
    for (int h = 0; h < HEADERS; h++) {
        constexpr int words = UNIT / 16 * STEP_BYTES / 4;  // of a lane, in one span
        u32* to = w.code + h * words;
        const u8* from = codes + h * SPAN_BYTES;
        if constexpr (words == 2) { const uint2 v = ((const uint2*)from)[lane]; to[0] = v.x, to[1] = v.y; }
        else
#pragma unroll
            for (int c = 0; c < words / 4; c++) {
                const uint4 v = ((const uint4*)from)[c * 32 + lane];
                to[4 * c] = v.x, to[4 * c + 1] = v.y, to[4 * c + 2] = v.z, to[4 * c + 3] = v.w;
            }
    }
}
// Unit `u` of a half tile's spans that start at `at`.
#define UNITS_OF_SPAN (SPAN > 64 ? SPAN / 64 : 1)
__device__ __forceinline__ void load_unit(Unit& w, const u8* at, u32 u, u32 lane) {
    const u32 within = u % UNITS_OF_SPAN;
    at += u / UNITS_OF_SPAN * HEADERS * SPAN_BYTES;
    load_unit(w, at, at + HEADER_BYTES + within * UNIT_BYTES, within, lane);
}

// Codes are the bits of a small number in the low mantissa bits of a bf16, which are that number times 2^-133 (a subnormal, or just
// beyond where the spacing is the same), exactly; shifted left by 4 they are worth 2^-129. rounded.cuh makes weights of them.

// A of step `j`: 16 inputs.
__device__ __forceinline__ void codes_of_step(u32 (&a)[4], const Unit& w, int j) {
    if constexpr (CODES == 0) {
        const u32 word = w.code[j], high = word >> 8;
        a[0] = word & 0x000f000fu, a[2] = word & 0x00f000f0u;
        a[1] = high & 0x000f000fu, a[3] = high & 0x00f000f0u;
    } else if constexpr (CODES == 1) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 word = w.code[2 * j + i];
            a[2 * i] = word & 0x00ff00ffu, a[2 * i + 1] = __byte_perm(word, 0, 0x4341);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 index = w.code[j] >> (4 * i) & 0x0f0f0f0fu;
            const u32 pairs = index | index >> 4;  // bytes 0 and 2: two indices each
            const u32 selector = __byte_perm(pairs, 0, 0x4420), eighths = selector & 0x7777;
            const u32 low = __byte_perm(0x3f2d1801u, 0x766a5d4fu, eighths);
            const u32 high = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, eighths);
            const u32 take = (index >> 3 & 0x01010101u) * 255;
            const u32 word = (low & ~take) | (high & take);
            a[2 * i] = word & 0x00ff00ffu, a[2 * i + 1] = __byte_perm(word, 0, 0x4341);
        }
    }
}

__device__ __forceinline__ float half_of(u32 word, int high) {
    if constexpr (SCALE == 1) return __uint_as_float(high ? word & 0xffff0000u : word << 16);
    else return f16_to_f32((u16)(high ? word >> 16 : word));
}
// Scale and bias of outputs g and g + 8 for part `s` of the unit.
__device__ __forceinline__ void scales(const Unit& w, int s, float (&scale)[2], float (&bias)[2]) {
    const u32* header = w.scale + (HEADERS > 1 ? s * HEADER_WORDS : 0);
#pragma unroll
    for (int o = 0; o < 2; o++) {
        if constexpr (SCALE == 2) {
            scale[o] = __uint_as_float(header[o * KINDS]);
            if (!SYMMETRIC) bias[o] = __uint_as_float(header[o * KINDS + 1]);
        } else if constexpr (SYMMETRIC) {
            scale[o] = half_of(header[0], o);
        } else {
            scale[o] = half_of(header[o], 0), bias[o] = half_of(header[o], 1);
        }
        if constexpr (SCALE == 3) {
            const u32 sub = w.scale[HEADER_WORDS + s] >> (8 * KINDS * o);
            if (SYMMETRIC) scale[o] *= (float)(i8)sub;
            else scale[o] *= (float)(u8)sub, bias[o] *= -(float)(u8)(sub >> 8);
        }
        if constexpr (SYMMETRIC) bias[o] = -(float)ZERO * scale[o];
    }
}
