/* Neurons of the last tokens (LLM in a flash): a neuron stays while its last use is in a window of
 * the last layers computed, which is as long as the slots allow. */
#include <string.h>

#include "simulation.h"

#define WINDOW_EPOCHS 65536u /* a longer window would hold nothing more in practice */

struct recent_neurons {
    uint32_t num_neurons, num_slots, num_held;
    uint32_t oldest; /* epoch whose neurons would go first; epochs count from 1 */
    uint32_t of_epoch[WINDOW_EPOCHS]; /* neurons held whose last use it was */
    uint32_t last_use[];              /* 0: never */
};

size_t recent_bytes(uint32_t num_neurons) {
    return sizeof(struct recent_neurons) + num_neurons * sizeof(uint32_t);
}

void recent_format(void *base, uint32_t num_neurons, uint32_t num_slots) {
    struct recent_neurons *recent = base;
    memset(recent, 0, recent_bytes(num_neurons));
    recent->num_neurons = num_neurons;
    recent->num_slots = num_slots;
    recent->oldest = 1;
}

static int is_held(const struct recent_neurons *recent, uint32_t neuron) {
    return recent->last_use[neuron] >= recent->oldest;
}

static void drop_oldest(struct recent_neurons *recent) {
    uint32_t *count = &recent->of_epoch[recent->oldest % WINDOW_EPOCHS];
    recent->num_held -= *count;
    *count = 0;
    recent->oldest++;
}

/* Room for one more: 0 when the running layer alone fills the slots. */
static int make_place(struct recent_neurons *recent, uint32_t now) {
    while (recent->num_held >= recent->num_slots && recent->oldest < now)
        drop_oldest(recent);
    return recent->num_held < recent->num_slots;
}

uint32_t recent_use(void *base, uint32_t now, const uint32_t *neurons, uint32_t n,
                    uint8_t *missed) {
    struct recent_neurons *recent = base;
    assert(now > 0 && now >= recent->oldest);
    while (now - recent->oldest >= WINDOW_EPOCHS)
        drop_oldest(recent);
    uint32_t num_missed = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t *last_use = &recent->last_use[neurons[i]];
        assert(neurons[i] < recent->num_neurons);
        missed[i] = !is_held(recent, neurons[i]);
        num_missed += missed[i];
        if (missed[i]) {
            if (!make_place(recent, now))
                continue;
            recent->num_held++;
        } else {
            recent->of_epoch[*last_use % WINDOW_EPOCHS]--;
        }
        *last_use = now;
        recent->of_epoch[now % WINDOW_EPOCHS]++;
    }
    return num_missed;
}

void recent_resize(void *base, uint32_t num_slots) {
    struct recent_neurons *recent = base;
    recent->num_slots = num_slots;
    while (recent->num_held > num_slots)
        drop_oldest(recent);
}
