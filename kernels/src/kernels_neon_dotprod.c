/* The table for 64-bit ARM CPUs with the dot-product instructions of ARMv8.2. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "neon_dotprod.h"

ALWAYS_INLINE void block_isum(const int type, const int tokens,
                              int32x4_t isum[MAX_TILE_TOKENS][RUN_REGISTERS],
                              const uint8_t *quants, const struct act_block *x, size_t num_blocks)
{
    block_isum_dotprod(type, tokens, isum, quants, x, num_blocks);
}

#include "neon_table.h"

static int supported_dotprod(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

const struct kernel_table kernels_neon_dotprod = {
    .isa = "neon_dotprod",
    .supported = supported_dotprod,
    NEON_KERNELS,
};
#endif
