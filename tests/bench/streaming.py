"""A 7B file in a memory cgroup smaller than itself, beside llama.cpp's mmap.

Each engine runs alone in a fresh cgroup of the same limit, in turn; what is compared are tokens a
second of decode. llama.cpp runs without repacking: with it, it is ended by the kernel.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

from tests.bench.random_model import ensure_model
from tests.support.memory_cgroup import memory_cgroup

LIMIT_BYTES = 3 << 30
NUM_TOKENS = 16
PEER_TOKENS = 4
NUM_ROUNDS = 3
NUM_THREADS = 2
TIMEOUT_S = 600.0
BAR = 2.0

PEER = """
import ctypes, json, sys, time
import llama_cpp as api
model_params = api.llama_model_default_params()
model_params.n_gpu_layers, model_params.use_extra_bufts = 0, False
model = api.llama_model_load_from_file(sys.argv[1].encode(), model_params)
params = api.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 512, int(sys.argv[2]), int(sys.argv[2])
context = api.llama_init_from_model(model, params)
def step(token):
    api.llama_decode(context, api.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1))
    api.llama_synchronize(context)
step(1)
started = time.monotonic()
for token in range(int(sys.argv[3])):
    step(100 + token)
print(json.dumps({"tokens_per_second": int(sys.argv[3]) / (time.monotonic() - started)}))
"""


def forget(path: Path) -> None:
    """Drop a file from the page cache: pages another cgroup paid for would be free for the next."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def inside(path: Path, words: list[str]) -> tuple[dict[str, object], int, int]:
    """Run with a cold file in a fresh cgroup; its JSON, the cgroup's peak and major faults."""
    forget(path)
    with memory_cgroup(LIMIT_BYTES) as cgroup:
        done = cgroup.run(words, TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"{words[:4]} ended with {done.returncode}: {done.stderr[-500:]}")
        result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return result, cgroup.peak_bytes(), cgroup.major_faults()


def ours(path: Path) -> tuple[float, str]:
    """Tokens a second, and what went with them."""
    words = [
        "-m", "polyneuron", "run", "-m", str(path), "-p", "a", "-n", str(NUM_TOKENS), "--temp", "0",
        "--ignore-eos", "--json", "-c", "512", "-t", str(NUM_THREADS),
        "--memory", str(LIMIT_BYTES),
    ]  # fmt: skip
    result, peak, faults = inside(path, [sys.executable, *words])
    timings, io = result["timings"], result["io"]
    assert isinstance(timings, dict) and isinstance(io, dict)
    flash = io["bytes_per_token"] / 2**20
    detail = f"{flash:.0f} MiB/token, peak {peak >> 20} MiB, {faults} major faults"
    return float(timings["predicted_per_second"]), detail


def peer(path: Path) -> tuple[float, str]:
    """The same of llama.cpp."""
    words = [sys.executable, "-c", PEER, str(path), str(NUM_THREADS), str(PEER_TOKENS)]
    result, peak, faults = inside(path, words)
    speed = result["tokens_per_second"]
    assert isinstance(speed, float)
    return speed, f"peak {peak >> 20} MiB, {faults} major faults"


def main() -> None:
    """Print every round and the ratio of the medians."""
    model = ensure_model()
    speeds: dict[str, list[float]] = {"polyneuron": [], "llama.cpp mmap": []}
    for number in range(NUM_ROUNDS):
        for name, (speed, detail) in (
            ("polyneuron", ours(model.ncf)),
            ("llama.cpp mmap", peer(model.gguf)),
        ):
            speeds[name].append(speed)
            print(f"round {number + 1}: {name}: {speed:.3f} tok/s, {detail}", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["polyneuron"] / medians["llama.cpp mmap"]
    verdict = "met" if ratio >= BAR else "not met"
    print(f"7B Q4_0 in {LIMIT_BYTES >> 20} MiB: {ratio:.2f}x llama.cpp mmap; bar {BAR}x: {verdict}")


if __name__ == "__main__":
    main()
