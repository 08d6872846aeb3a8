/* The AVX-512 table, for CPUs with VNNI. */
#if defined(__x86_64__)
#include "kernels_isa.h"

static int supported_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
}

const struct kernel_table kernels_avx512 = {
    .isa = "avx512",
    .supported = supported_avx512,
};
#endif
