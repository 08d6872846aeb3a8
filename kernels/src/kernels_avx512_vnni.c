/* The AVX-512 table, for CPUs with VNNI. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,avx2")
#include <immintrin.h>

#include "kernels_isa.h"

#define VF 16
#include "lanes.h"

ALWAYS_INLINE vf load_f16(const uint16_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
}

ALWAYS_INLINE void store_f16(uint16_t *to, vf value)
{
    _mm256_storeu_si256((void *)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

ALWAYS_INLINE float load_half(const uint16_t *from) { return _cvtsh_ss(*from); }

ALWAYS_INLINE vi load_i8(const uint8_t *from)
{
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
}

ALWAYS_INLINE vi load_u8(const uint8_t *from)
{
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
}

/* A broadcast of its own takes a turn of the units that multiply and add; one that is part of the
 * product takes none (Zen 4: a product of 4 rows by 32 columns 38 -> 51 GMAC/s). The compiler would
 * share one broadcast among products. */
ALWAYS_INLINE vf times(vf value, const float *factor)
{
    vf product;
    __asm__("vmulps %2%{1to16%}, %1, %0" : "=v"(product) : "v"(value), "m"(*factor));
    return product;
}

#include "avx512_matmul.h"
#include "avx512_rows.h"
#include "lanes_dot.h"
#include "lanes_rows.h"
#include "lanes_lookup.h"
#include "lanes_attention_block.h"

static int supported_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
}

/* 16 scaled activations as int32; a NaN becomes 0 */
ALWAYS_INLINE __m512i quantize_16(const float *x, __m512 inverse)
{
    __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x), inverse);
    __mmask16 ordered = _mm512_cmp_ps_mask(scaled, scaled, _CMP_ORD_Q);
    return _mm512_cvtps_epi32(_mm512_maskz_mov_ps(ordered, scaled));
}

static void quantize_acts_avx512(struct act_block *out, const float *x, size_t cols)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, x += BLOCK_COLS, out++) {
        __m512i low_bits = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
        __m512i high_bits = _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude);
        uint32_t amax_bits = _mm512_reduce_max_epu32(_mm512_max_epu32(low_bits, high_bits));
        if (amax_bits < ACT_AMAX_MIN_BITS) {
            memset(out, 0, sizeof *out);
            continue;
        }
        const float amax = f32_of_bits(amax_bits);
        const __m512 inverse = _mm512_set1_ps(127.0f / amax);
        __m512i low = quantize_16(x, inverse), high = quantize_16(x + 16, inverse);
        _mm_storeu_si128((void *)out->quants, _mm512_cvtepi32_epi8(low));
        _mm_storeu_si128((void *)(out->quants + 16), _mm512_cvtepi32_epi8(high));
        out->scale = amax / 127.0f;
        out->sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
}

const struct kernel_table kernels_avx512 = {
    .isa = "avx512",
    .supported = supported_avx512,
    .quantize_acts = quantize_acts_avx512,
    .matmul_tiles = matmul_tiles_avx512,
    .gather_row = gather_row_lanes,
    .dot_rows = dot_rows_lanes,
    .axpy_rows = axpy_rows_lanes,
    .rmsnorm_f32 = rmsnorm_lanes,
    .layernorm_f32 = layernorm_lanes,
    .softcap_f32 = softcap_lanes,
    .add_f32 = add_lanes,
    .feed_forward_act = feed_forward_act_lanes,
    .rope_head = rope_head_lanes,
    .exp_f32 = exp_lanes,
    .softmax_f32 = softmax_lanes,
    .argmax_f32 = argmax_lanes,
    .top_k_f32 = top_k_lanes,
    .kv_write = kv_write_lanes,
    .attention_heads = attention_heads_lanes,
    .attention_block = attention_block_lanes,
};
#endif
