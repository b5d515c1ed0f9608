// Quantised weights in the order of fragments.rs. Defines of a launch:
//   CODES      0 U4, 1 U8, 2 IQ4
//   SYMMETRIC  1 without biases
//   GROUP      inputs under one scale
//   SCALE      0 f16, 1 bf16, 2 f32, 3 two levels

#define KINDS (SYMMETRIC ? 1 : 2)
#define SCALE_BYTES (SCALE == 2 ? 4 : 2)
#define SPAN (SCALE == 3 ? 256 : GROUP)
#define UNIT (SPAN < 64 ? SPAN : 64)
#define SUB_AT (16 * KINDS * SCALE_BYTES)
#define HEADER_BYTES (SUB_AT + (SCALE == 3 ? 256 / GROUP * 16 * KINDS : 0))
#define STEP_BYTES (CODES == 1 ? 8 : 4)
#define UNIT_BYTES (UNIT / 16 * STEP_BYTES * 32)
#define SPAN_BYTES (HEADER_BYTES + SPAN / UNIT * UNIT_BYTES)
#define ZERO (CODES == 0 ? 8 : 128)

// The value of an IQ4 code, plus 128.
__device__ __forceinline__ u32 iq4_value(u32 code) {
    const u64 low = 0x766a5d4f3f2d1801ull, high = 0xf1d9c5b5a6998d81ull;
    return (code & 8 ? high : low) >> (8 * (code & 7)) & 255;
}

__device__ __forceinline__ float level_one(const u8* at) {
    if constexpr (SCALE == 2) return *(const float*)at;
    else if constexpr (SCALE == 1) return bf16_to_f32(*(const u16*)at);
    else return f16_to_f32(*(const u16*)at);
}

// Input `i` of output `o` of a matrix with k inputs, as the definition has it: rounded after the
// product and after the sum.
__device__ __forceinline__ float quantised_weight(const u8* w, u32 k, u32 o, u32 i) {
    const u8* span = w + (u64)(o / 16) * (k / SPAN) * SPAN_BYTES + (u64)(i / SPAN) * SPAN_BYTES;
    const u32 entry = o % 8 * 2 + o / 8 % 2;
    i %= SPAN;
    float scale = level_one(span + entry * KINDS * SCALE_BYTES), bias = 0.f;
    if (!SYMMETRIC) bias = level_one(span + (entry * 2 + 1) * SCALE_BYTES);
    if (SCALE == 3) {
        const u8* sub = span + SUB_AT + (i / GROUP * 16 + entry) * KINDS;
        if (SYMMETRIC) scale = __fmul_rn(scale, (float)(i8)sub[0]);
        else scale = __fmul_rn(scale, (float)sub[0]), bias = -__fmul_rn(bias, (float)sub[1]);
    }
    constexpr u32 chunk = UNIT / 16 * STEP_BYTES < 16 ? UNIT / 16 * STEP_BYTES : 16;
    const u32 step = i % UNIT / 16, lane = 4 * (o % 8) + i % 8 / 2, i4 = i % 16 / 8 * 2 + i % 2;
    const u32 of_lane = step * STEP_BYTES + (CODES == 1 ? i4 / 2 * 4 : 0) + i4 % 2 * 2 + o / 8 % 2;
    const u8* codes = span + HEADER_BYTES + i / UNIT * UNIT_BYTES;
    const u32 byte = codes[of_lane / chunk * 32 * chunk + lane * chunk + of_lane % chunk];
    const u32 raw = CODES == 1 ? byte : byte >> (i4 / 2 * 4) & 15;
    const int code = (int)(CODES == 2 ? iq4_value(raw) : raw);
    return SYMMETRIC ? __fmul_rn(scale, (float)(code - ZERO)) : __fadd_rn(__fmul_rn(scale, (float)code), bias);
}
