#ifndef POLYNEURON_ENGINE_H
#define POLYNEURON_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "engine_api.h"

#endif
