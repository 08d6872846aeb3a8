"""Tests of the kernels: every instruction set against the numpy reference, bit for bit."""
