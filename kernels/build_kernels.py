"""Builds polyneuron.kernels._kernels from kernels/src (cffi API mode); run by setup.py."""

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(path.relative_to(ROOT.parent).as_posix() for path in (ROOT / "src").glob("*.c"))
HEADERS = sorted(path.relative_to(ROOT.parent).as_posix() for path in (ROOT / "src").glob("*.h"))
# Declarations only: cffi parses no preprocessor.
API_HEADERS = (
    "kernels_api.h", "engine_api.h", "io_engine_api.h", "neuron_cache_api.h", "neuron_reads_api.h",
    "simulation_api.h", "trace_api.h",
)  # fmt: skip
COMPILE_FLAGS = [
    "-O3",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-UNDEBUG",  # Python's own flags would switch every C assert off
    "-ffp-contract=off",  # a fused multiply-add would change results between ISAs
    "-Wall",
    "-Wextra",
    "-Werror",
]

# Python functions that C calls, from `executor_serve` and so with the GIL taken for each call.
CALLED_BY_C = """
extern "Python" int32_t python_backend_takes(void *, const struct step_op *, uint32_t);
extern "Python" int32_t python_backend_run(void *, const struct step_op *, uint32_t);
"""

INCLUDED = ("kernels", "engine", "io_engine", "neuron_reads", "simulation", "trace")

ffibuilder = FFI()
ffibuilder.cdef("\n".join((ROOT / "src" / name).read_text() for name in API_HEADERS))
ffibuilder.cdef(CALLED_BY_C)
ffibuilder.set_source(
    "polyneuron.kernels._kernels",
    "".join(f'#include "{name}.h"\n' for name in INCLUDED),
    sources=SOURCES,
    include_dirs=["kernels/src"],
    depends=HEADERS,
    extra_compile_args=COMPILE_FLAGS,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
