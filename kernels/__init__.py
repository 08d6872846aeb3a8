"""C kernels and their checked Python faces; `gemv` and `quant` are the entry points."""
