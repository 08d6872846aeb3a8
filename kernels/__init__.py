"""Python faces of the C kernels and of the hot path over the arena; no clock, no config."""
