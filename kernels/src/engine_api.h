/* The hot path over the arena: waits, step programs. Declarations only. */
