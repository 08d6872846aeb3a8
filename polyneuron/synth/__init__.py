"""Model files of random weights: real models' shapes with planted sparsity (docs/SYNTH.md)."""
