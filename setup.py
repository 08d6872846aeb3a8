"""Names the C extension: `cffi_modules` has no place in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["kernels/build_kernels.py:ffibuilder"])
