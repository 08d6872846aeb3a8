/* One table of kernels an ISA. A NULL slot is filled from the scalar table when the table is
 * selected, so a caller never meets an empty one. */
#ifndef POLYNEURON_KERNELS_ISA_H
#define POLYNEURON_KERNELS_ISA_H

#include "kernels.h"

struct kernel_table {
    const char *isa;
    int (*supported)(void);
    void (*quantize_acts)(struct act_block *, const float *, size_t);
    void (*matmul_tiles)(int, float *, size_t, const void *, size_t, size_t, const void *, size_t);
    void (*gather_row)(int, float *, const void *, size_t, size_t);
    void (*dot_rows)(int, float *, const void *, size_t, const uint32_t *, size_t, size_t,
                     const void *);
    void (*axpy_rows)(int, float *, const void *, size_t, const uint32_t *, const float *, size_t,
                      size_t);
    void (*rmsnorm_f32)(float *, const float *, const float *, size_t, float);
    void (*layernorm_f32)(float *, const float *, const float *, const float *, size_t, float);
    void (*softcap_f32)(float *, size_t, float);
    void (*add_f32)(float *, const float *, size_t);
    void (*feed_forward_act)(int, float *, const float *, const float *, size_t);
    void (*rope_head)(int, float *, const float *, const float *, size_t);
    void (*exp_f32)(float *, const float *, size_t);
    void (*softmax_f32)(float *, size_t);
    size_t (*argmax_f32)(const float *, size_t);
    void (*top_k_f32)(uint32_t *, float *, const float *, size_t, size_t);
    void (*kv_write)(void *, size_t, const float *, const float *, size_t);
    void (*attention_heads)(int, float *, const float *, size_t, size_t, const void *,
                            const int32_t *, size_t, size_t, size_t, float, float, float *);
    void (*attention_block)(int, float *, size_t, const float *, size_t, size_t, size_t, size_t,
                            const void *, const int32_t *, size_t, size_t, size_t, float, float,
                            float *);
};

extern const struct kernel_table kernels_scalar;
#if defined(__x86_64__)
extern const struct kernel_table kernels_avx2;
extern const struct kernel_table kernels_avx512;
#elif defined(__aarch64__)
extern const struct kernel_table kernels_neon;
extern const struct kernel_table kernels_neon_dotprod;
extern const struct kernel_table kernels_neon_i8mm;
#endif

#endif
