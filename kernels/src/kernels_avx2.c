/* The AVX2 + F16C table. */
#if defined(__x86_64__)
#include "kernels_isa.h"

static int supported_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

const struct kernel_table kernels_avx2 = {
    .isa = "avx2",
    .supported = supported_avx2,
};
#endif
