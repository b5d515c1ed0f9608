// embed: out[r] = table[min(ids[r], N - 1)], dequantised: scale * code + bias, or scale * (code - ZERO)
// shapes   ids (rows) u32; table: a dense row-major matrix, or tiles as linear/layout.rs has them; out (rows, K) f32
// launch   grid (rows, K / 1024), block 256: a thread makes four neighbours
// traffic  one row of the table and of the output for each row
// source   definition: mod.rs reference(); product and sum are rounded apart, as there

#define F32 0
#define F16 1
#define BF16 2
#define TWO_LEVEL 3
#define U4 0
#define U8 1
#define IQ4 2

__device__ const signed char IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};

#if QUANTISED
__device__ __forceinline__ float level_one(const char* span, u32 kind, u32 o) {
    const char* at = span + kind * SCALE_BYTES;
#if SCALE == F32
    return ((const float*)at)[o];
#elif SCALE == BF16
    return bf16_to_f32(((const u16*)at)[2 * (o % 16) + o / 16]);
#else
    return f16_to_f32(((const u16*)at)[o]);
#endif
}

// Row o of a tile, inputs k .. k + 4.
__device__ __forceinline__ float4 weights(const char* tile, u32 o, u32 k) {
    const char* span = tile + (u64)(k / SPAN) * SPAN_BYTES;
    u32 in_span = k % SPAN;
    float scale = level_one(span, 0, o), bias = SYMMETRIC ? 0.0f : level_one(span, 1, o);
#if SCALE == TWO_LEVEL
    u32 row = 32 * (in_span / GROUP) + o;
    if (SYMMETRIC) {
        scale = __fmul_rn(scale, (float)((const i8*)span)[SUB_SCALES + row]);
    } else {
        scale = __fmul_rn(scale, (float)((const u8*)span)[SUB_SCALES + row]);
        bias = -__fmul_rn(bias, (float)((const u8*)span)[SUB_SCALES + 32 * (SPAN / GROUP) + row]);
    }
#endif
    const char* codes = span + HEADER_BYTES + in_span / 4 * (CODES == U8 ? 128 : 64);
    u32 word = *(const u32*)(codes + (CODES == U8 ? 64 * (o / 16) : 0) + 4 * (o % 16));
    if (CODES != U8) word = (o < 16 ? word : word >> 4) & 0x0f0f0f0fu;
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i32 code = (word >> (8 * i)) & 255;
        if (CODES == IQ4) code = IQ4_TABLE[code] + 128;
        w[i] = SYMMETRIC ? __fmul_rn(scale, (float)(code - ZERO))
                         : __fadd_rn(__fmul_rn(scale, (float)code), bias);
    }
    return make_float4(w[0], w[1], w[2], w[3]);
}
#endif

extern "C" __global__ void __launch_bounds__(256)
embed(const u32* ids, const char* table, float* out, u32 n) {
    launch_next();
    u32 row = blockIdx.x, k = 4 * (blockIdx.y * 256 + threadIdx.x);
    wait();
    if (k >= K) return;
    u32 id = min(ids[row], n - 1);
    float* to = out + (u64)row * K + k;
#if QUANTISED
    *(float4*)to = weights(table + (u64)(id / 32) * PIECE_BYTES, id % 32, k);
#else
    const char* from = table + (u64)id * PIECE_BYTES;
    for (u32 i = 0; i < 4 && k + i < K; i++) {
        if (SCALE == F32) to[i] = ((const float*)from)[k + i];
        if (SCALE == F16) to[i] = f16_to_f32(((const u16*)from)[k + i]);
        if (SCALE == BF16) to[i] = bf16_to_f32(((const u16*)from)[k + i]);
    }
#endif
}
