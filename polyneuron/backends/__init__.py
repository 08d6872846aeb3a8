"""Back ends of the NPU executor: who computes its dense matrices (DESIGN §8)."""
