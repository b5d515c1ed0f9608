// Weights as bf16 operands (after fragments.cuh).

// Codes are multiplied as the subnormal numbers that their bits are, by scales that make up for most of it. Weights come out
// 2^-40 times what they should be, and so do sums; from 2^-86 to 2^35 (bf16 and f32 scales) all of these are normal numbers and rounded as
// if they were not scaled.
#define WEIGHTS_UNSCALE 0x1p40f

// One half of a pair, twice. An instruction's operand may be that, so that it costs none.
__device__ __forceinline__ u32 twice(u32 pair, int high) {
    u32 d;
    if (high) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(pair));
    else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(pair));
    return d;
}

// A of the four steps of a unit: bf16 weights.
__device__ __forceinline__ void weights_of_unit(u32 (&a)[4][4], const Unit& w) {
#pragma unroll
    for (int s = 0; s < SUBS; s++) {
        float scale[2], bias[2];
        u32 by[2], by_shifted[2], plus[2];
        if constexpr (SCALE == 1 && !SYMMETRIC) {
#pragma unroll
            for (int o = 0; o < 2; o++) {
                const u32 pair = mul_bf16x2(w.scale[(HEADERS > 1 ? s * HEADER_WORDS : 0) + o], 0x2b806e00u);  // by 2^93 and 2^-40
                by[o] = twice(pair, 0), plus[o] = twice(pair, 1);
                by_shifted[o] = mul_bf16x2(by[o], 0x3d803d80u);  // 2^-4
            }
        } else {
            scales(w, s, scale, bias);
#pragma unroll
            for (int o = 0; o < 2; o++) scale[o] *= 0x1p93f, bias[o] *= 0x1p-40f;
        }
#pragma unroll
        for (int j = s * 4 / SUBS; j < (s + 1) * 4 / SUBS; j++) {
            codes_of_step(a[j], w, j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool shifted = CODES == 0 && i >= 2;
                const u32 code = a[j][i];
                if constexpr (SCALE == 1 && !SYMMETRIC) {  // scale and bias are bf16: rounded once
                    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[j][i]) : "r"(code), "r"(shifted ? by_shifted[i % 2] : by[i % 2]), "r"(plus[i % 2]));
                } else {
                    const float f = shifted ? scale[i % 2] * 0.0625f : scale[i % 2];
                    a[j][i] = pack_bf16(fmaf(__uint_as_float(code << 16), f, bias[i % 2]), fmaf(__uint_as_float(code & 0xffff0000u), f, bias[i % 2]));
                }
            }
        }
    }
}
