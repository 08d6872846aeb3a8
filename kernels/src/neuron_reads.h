#ifndef POLYNEURON_NEURON_READS_H
#define POLYNEURON_NEURON_READS_H

#include "io_engine.h"
#include "neuron_cache.h"

#include "neuron_reads_api.h"

#endif
