"""Steps that are aborted while the neuron cache is in use: everybody leaves, the next goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.actors.arena import format_neuron_cache, resize_neuron_cache
from polyneuron.actors.supervisor import Supervisor
from polyneuron.config import Phase
from polyneuron.io.ncf_format import Layout
from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.arena import Unit
from polyneuron.model.convert import convert
from polyneuron.planning.layout import num_executors
from tests.support.leftovers import wait_until
from tests.support.local_engine import LocalEngine
from tests.support.sparse_models import drelu_model
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = [3]
LONG_PROMPT = [3, 14, 15, 92, 65]
NUM_TOKENS = 3
SLICE_NS = 100_000_000
LOCK_NS = 1_000_000_000
MODEL = drelu_model(4)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aborted")
    gguf = write_tiny_gguf(folder / "sparse.gguf", MODEL)
    convert(gguf, folder / "sparse.ncf", layout=Layout.BUNDLES)
    return folder / "sparse.ncf"


@pytest.fixture(scope="module")
def expected(bundles: Path) -> list[bytes]:
    with LocalEngine(bundles) as engine:
        return logits_of(engine)


def logits_of(engine: LocalEngine) -> list[bytes]:
    return [row.tobytes() for row in engine.generate(PROMPT, NUM_TOKENS).logits]


class Disturbed(LocalEngine):
    """An engine whose first late step is mended by what the test says."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.num_late = 0

    def mend(self) -> bool:
        raise NotImplementedError

    def _check_threads(self) -> bool:
        super()._check_threads()
        self.num_late += 1
        return self.num_late == 1 and self.mend()


class LostLockHolder(Disturbed):
    """Somebody took the cache's lock and was lost, as an executor that is killed."""

    def mend(self) -> bool:
        everybody = Supervisor(self.arena, tuple(range(num_executors(self.config))))
        self.arena.abort()
        wait_until(lambda: everybody.all_idle(but=[]), "executors have left the step", 5.0)
        format_neuron_cache(self.arena, self.layout)
        self.arena.clear_abort()
        return True


class SlowReads(Disturbed):
    """Reads that an aborted step ordered begin late."""

    def mend(self) -> bool:
        with self.cache().locked(LOCK_NS):
            self.arena.resume_neuron_reads(self.layout.at("boards.reads"))
        return False


def test_nobody_waits_for_a_lost_holder_of_the_lock(bundles: Path, expected: list[bytes]) -> None:
    with LostLockHolder(bundles, ffn_resident=0.8) as engine:
        assert lib.neuron_cache_lock(ffi.cast("void *", engine.cache().address), LOCK_NS) == 0
        assert logits_of(engine) == expected
        assert engine.num_late == 1


def test_a_cache_that_was_made_whole_keeps_its_size(bundles: Path, expected: list[bytes]) -> None:
    with LocalEngine(bundles, ffn_resident=0.8) as engine:
        format_neuron_cache(engine.arena, engine.layout, MODEL.d_ff)
        assert engine.cache().sizes().num_slots == MODEL.d_ff
        assert logits_of(engine) == expected


def test_a_step_waits_for_slots_that_are_read_into(bundles: Path, expected: list[bytes]) -> None:
    with SlowReads(bundles, ffn_resident=0.6) as engine:
        reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
        wait_until(lambda: bool(reads.sleeping), "the reader waits for orders")
        resize_neuron_cache(engine.arena, engine.layout, MODEL.d_ff)
        last = (MODEL.num_layers - 1) * MODEL.d_ff
        with engine.cache().locked(LOCK_NS):
            engine.cache().use(1 << 30, np.arange(last, last + MODEL.d_ff, dtype=np.uint32))
        assert logits_of(engine) == expected
        assert engine.num_late >= 1


def test_who_wakes_late_leaves_a_step_that_is_over(bundles: Path) -> None:
    """The loads of that step are gone: those that land now are of another pass."""
    with LocalEngine(bundles, ffn_resident=0.0) as engine:
        logits_of(engine)
        stream = engine.arena.layer_stream(engine.layout.at("boards.stream"))
        engine.arena.stop_stream(engine.layout.at("boards.stream"))
        generation = engine.arena.attach(0, Unit.CPU, os.getpid())
        engine.arena.executor(0).seen_seq -= 1
        engine.arena.step.stream_base = stream.landed + 100
        late = threading.Thread(
            target=engine.arena.serve, args=(0, generation, SLICE_NS), daemon=True
        )
        late.start()
        late.join(5.0)
        assert not late.is_alive()


def test_a_list_that_was_wanted_by_a_failed_step_is_not_taken_for_another(
    bundles: Path, expected: list[bytes]
) -> None:
    """A step failed while it waited for its loads; the next one wants those of before."""
    with LocalEngine(bundles, ffn_resident=0.25) as engine:
        engine.generate(LONG_PROMPT, 1)
        assert logits_of(engine) == expected
        offset = engine.layout.at("boards.stream")
        assert engine.arena.layer_stream(offset).serving == 1
        engine.arena.switch_stream(offset, 0, len(engine.layout.loads(Phase.PREFILL)))
        assert logits_of(engine) == expected
