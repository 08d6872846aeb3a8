/* The neuron cache: which neurons' rows lie in which slots of the arena (DESIGN §4, PAPER §1.6).
 * Declarations only: neuron_cache.h includes this file and cffi's cdef() reads it.
 *
 * One library for the engine, where it lives in shared memory and executors of several processes
 * call it, and for the simulation, where one thread calls it. Slots are numbered: the hot region is
 * slots [0, hot_slots), held by whole clusters of consecutive neurons; the cold region is slots
 * [hot_slots, num_slots), held neuron by neuron. The library moves no weights: it decides.
 *
 * A neuron's id counts through all layers: layer * neurons_per_layer + index in the file. */

enum neuron_state {
    NEURON_ABSENT = 0,    /* no slot */
    NEURON_LOADING = 1,   /* has a slot, its bytes are on their way */
    NEURON_RESIDENT = 2,  /* in the cold region */
    NEURON_PINNED = 3,    /* in the hot region */
    NEURON_EVICTING = 4   /* its slot goes as soon as the running epoch is over */
};

enum { NO_SLOT = 0xFFFFFF, SLOT_LATE = 0x80000000 };

struct neuron_miss { uint32_t neuron; uint32_t slot; };

struct slot_move { uint32_t from_slot; uint32_t to_slot; uint32_t num_slots; };

struct neuron_cache_counters {
    uint64_t hits;            /* used while resident or pinned */
    uint64_t hot_hits;        /* of them, in the hot region */
    uint64_t misses;          /* admitted */
    uint64_t late;            /* used while loading (each use counts) */
    uint64_t evictions;
    uint64_t failures;        /* loads that failed */
    uint32_t num_resident;    /* neurons in the cold region, loading ones too */
    uint32_t num_pinned;
};

struct neuron_cache_sizes {
    uint32_t num_neurons;
    uint32_t max_slots;
    uint32_t hot_slots;
    uint32_t num_slots;
    uint32_t cluster_neurons;
};

/* Bytes of a cache of so many neurons and at most so many slots. */
size_t neuron_cache_bytes(uint32_t num_neurons, uint32_t max_slots);
/* Format: every neuron absent, every slot free, counters zero. The lock is free afterwards, whoever
 * held it: after the loss of an executor this is how a cache is made whole again. Nobody else may
 * be at work in it, and no read it ordered may be under way. */
void neuron_cache_format(void *cache, uint32_t num_neurons, uint32_t max_slots, uint32_t hot_slots,
                         uint32_t num_slots, uint32_t cluster_neurons);

/* A lock over processes, spinning briefly, then sleeping. 0, or -1 when the time is over. Calls
 * below that say "locked" need it held; the simulation has no need to. */
int neuron_cache_lock(void *cache, int64_t timeout_ns);
void neuron_cache_unlock(void *cache);

/* Locked. The neurons (ascending, no doubles) are used in `epoch`: none of them, and none used
 * earlier in the same epoch, is evicted until the epoch changes. slots[i] becomes the slot of
 * neurons[i], with SLOT_LATE set while its bytes have not landed. Absent ones are admitted and
 * written to misses (room for n). Returns the number of misses, or -1 when some neuron found no
 * slot that may be evicted: then nothing was admitted. */
int neuron_cache_use(void *cache, uint32_t epoch, const uint32_t *neurons, uint32_t n,
                     uint32_t *slots, struct neuron_miss *misses);
/* The bytes of a loading neuron have landed; wakes who waits for it. Needs no lock. Nothing happens
 * to a neuron that is not loading, here and in the next call. */
void neuron_cache_landed(void *cache, uint32_t neuron);
/* Locked. A load failed: the neuron is absent again, its slot free; wakes who waits for it. */
void neuron_cache_failed(void *cache, uint32_t neuron);
/* Wait until the neuron is not loading: 1 when it may be used, 0 when the time is over, -1 when it
 * is absent. Needs no lock. */
int neuron_cache_wait(void *cache, uint32_t neuron, int64_t timeout_ns);

/* Locked. The epoch that the last call named: resize during a step names it, so that what the step
 * uses stays. */
uint32_t neuron_cache_epoch(const void *cache);

/* The hot region is cut into runs of cluster_neurons slots; a cluster, cluster_neurons consecutive
 * neurons from a multiple of it, lies in one run. Slots behind the last whole run stay empty.
 *
 * Where the calls below order moves, the caller copies them, in their order, before it unlocks:
 * num_slots slots' bytes from from_slot to to_slot. An executor that has got the old slot in this
 * epoch may go on reading it; it is handed out again only in a later epoch. */

/* Locked, at start-up: n consecutive neurons, all absent, are pinned in consecutive hot slots, all
 * free. Both begin at a multiple of cluster_neurons. Their bytes have been read. */
void neuron_cache_pin(void *cache, uint32_t first_neuron, uint32_t n, uint32_t first_slot);
/* Locked. A whole cluster becomes hot, in an empty run or in that of the least active cluster.
 * Neurons that are cold now are moved, absent ones are written to misses and must be read; both
 * have room for cluster_neurons. Returns the number of misses, or -1 when some neuron is loading or
 * about to leave its slot, or every run is in use or loading: then nothing has changed. */
int neuron_cache_admit_hot(void *cache, uint32_t epoch, uint32_t cluster,
                           struct neuron_miss *misses, struct slot_move *moves,
                           uint32_t *num_moves);
/* Locked. New sizes of both regions, at most max_slots. Clusters and neurons that have no place any
 * more leave at once, the least active clusters first; those in use in `epoch` become evicting and
 * leave when a call names a later epoch, loading ones leave in the first epoch after they have
 * landed. Clusters that stay but lose their run move to an empty one; moves has room for hot_slots.
 * Returns the number of moves. While neuron_cache_pending() is not 0, slots outside of their region
 * are still held: call again with the same sizes in later epochs. */
uint32_t neuron_cache_resize(void *cache, uint32_t epoch, uint32_t hot_slots, uint32_t num_slots,
                             struct slot_move *moves);
/* Slots that the last resize could not free yet. Needs no lock. */
uint32_t neuron_cache_pending(const void *cache);

/* Locked. Every cold neuron that is not loading leaves its slot, as if nothing had been kept since
 * `epoch` began: what a run without a cache reads. */
void neuron_cache_forget(void *cache, uint32_t epoch);

/* Lock-free look at one neuron; has: its bytes are here, and what the caller reads of them after
 * this are they. */
int neuron_cache_has(const void *cache, uint32_t neuron);
uint32_t neuron_cache_state(const void *cache, uint32_t neuron);
uint32_t neuron_cache_slot(const void *cache, uint32_t neuron);
void neuron_cache_get_counters(const void *cache, struct neuron_cache_counters *counters);
void neuron_cache_get_sizes(const void *cache, struct neuron_cache_sizes *sizes);
/* What may become of a neuron in this state: bit s is set for state s. */
uint32_t neuron_cache_allowed(uint32_t state);
