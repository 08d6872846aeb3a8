/* The table for 64-bit ARM CPUs with the int8 matrix instructions of ARMv8.6. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "neon_i8mm.h"
#include "neon_table.h"

static int supported_i8mm(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM);
}

const struct kernel_table kernels_neon_i8mm = {
    .isa = "neon_i8mm",
    .supported = supported_i8mm,
    NEON_KERNELS,
};
#endif
