#ifndef POLYNEURON_KERNELS_H
#define POLYNEURON_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels_api.h"

#endif
