/* The table for every 64-bit ARM CPU: plain NEON. */
#if defined(__aarch64__)
#include "neon_widening.h"
#include "neon_table.h"

static int supported_neon(void) { return 1; }

const struct kernel_table kernels_neon = {
    .isa = "neon",
    .supported = supported_neon,
    NEON_KERNELS,
};
#endif
