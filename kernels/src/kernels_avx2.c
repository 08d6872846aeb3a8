/* The AVX2 + F16C table. */
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")
#include <immintrin.h>

#include "kernels_isa.h"

#define VF 8
#include "lanes.h"

ALWAYS_INLINE vf load_f16(const uint16_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}

ALWAYS_INLINE void store_f16(uint16_t *to, vf value)
{
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

ALWAYS_INLINE vf times(vf value, const float *factor) { return value * *factor; }

ALWAYS_INLINE float load_half(const uint16_t *from) { return _cvtsh_ss(*from); }

ALWAYS_INLINE vi load_i8(const uint8_t *from)
{
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
}

ALWAYS_INLINE vi load_u8(const uint8_t *from)
{
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
}

#include "avx2_matmul.h"
#include "avx2_rows.h"
#include "lanes_dot.h"
#include "lanes_terms.h"
#include "lanes_rows.h"
#include "lanes_lookup.h"
#include "lanes_attention_block.h"

static int supported_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

/* 8 scaled activations as int32; a NaN becomes 0 */
ALWAYS_INLINE __m256i quantize_8(const float *x, __m256 inverse)
{
    __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
    __m256 ordered = _mm256_cmp_ps(scaled, scaled, _CMP_ORD_Q);
    return _mm256_cvtps_epi32(_mm256_and_ps(scaled, ordered));
}

ALWAYS_INLINE uint32_t max_bits(const float *x)
{
    __m256i most = _mm256_setzero_si256();
    for (int k = 0; k < BLOCK_COLS; k += 8) {
        __m256i bits = _mm256_loadu_si256((const void *)(x + k));
        most = _mm256_max_epu32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(four);
}

static void quantize_acts_avx2(struct act_block *out, const float *x, size_t cols)
{
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, x += BLOCK_COLS, out++) {
        const uint32_t amax_bits = max_bits(x);
        if (amax_bits < ACT_AMAX_MIN_BITS) {
            memset(out, 0, sizeof *out);
            continue;
        }
        const float amax = f32_of_bits(amax_bits);
        const __m256 inverse = _mm256_set1_ps(127.0f / amax);
        __m256i quants[4], sum = _mm256_setzero_si256();
        for (int k = 0; k < 4; k++) {
            quants[k] = quantize_8(x + 8 * k, inverse);
            sum = _mm256_add_epi32(sum, quants[k]);
        }
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(quants[0], quants[1]),
                                           _mm256_packs_epi32(quants[2], quants[3]));
        /* packing works in 128-bit lanes: put the words of four back in order */
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((void *)out->quants, bytes);
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
        out->sum = _mm_cvtsi128_si32(four);
        out->scale = amax / 127.0f;
    }
}

const struct kernel_table kernels_avx2 = {
    .isa = "avx2",
    .supported = supported_avx2,
    .quantize_acts = quantize_acts_avx2,
    .matmul_tiles = matmul_panel,
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
