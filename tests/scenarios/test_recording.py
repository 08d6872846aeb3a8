"""Scenarios that play a recording: whose neurons are used when, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.io.activation_trace import read_trace
from polyneuron.scenarios.checkers import Checker
from polyneuron.scenarios.engine_settings import Policy
from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.playing import Play, play_all
from polyneuron.scenarios.recorded_activity import RecordedActivity
from polyneuron.scenarios.script import load_script
from polyneuron.scenarios.simulated_engine import SimulatedEngine, StepOutcome
from polyneuron.scenarios.simulation import SimulatedRun, simulate
from polyneuron.scenarios.timeline_sink import KeptTimeline
from tests.support import sparse_files
from tests.support.program import run
from tests.support.recordings import made_up, write_masks
from tests.support.simulated import EXPERTS, ROOT, TINY_MODEL, script, write_script
from tests.support.sparse_files import write_sparse_file

LAYERS, NEURONS, TOKENS = 3, 512, 50
MASKS = made_up(LAYERS, TOKENS, NEURONS)
PLAYED = '[activity]\ntrace = "text.trace"\n'
SEVERAL = "prompt_tokens = 6\noutput_tokens = 9\ncount = 3\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a recording of the tiny model."""
    write_masks(tmp_path / "text.trace", MASKS, 32)
    return tmp_path


class Listener(Checker):
    """Keeps what each step needed: (sequences' slots, their neurons)."""

    def __init__(self) -> None:
        super().__init__(is_thorough=True)
        self.needed: list[list[NDArray[np.bool_]]] = []

    def step_done(self, engine: SimulatedEngine, outcome: StepOutcome) -> None:
        super().step_done(engine, outcome)
        found = []
        for slot in range(engine.settings.max_sequences):
            bits = np.unpackbits(engine.steps.active_bits(slot).view(np.uint8), bitorder="little")
            found.append(bits.reshape(LAYERS, NEURONS).astype(bool))
        self.needed.append(found)


def listened(folder: Path, requests: str, extra: str = PLAYED, engine: str = "") -> Listener:
    made, heard = script(folder, requests=requests, extra=extra, engine=engine), Listener()
    SimulatedRun(made, None, checker=heard).play()
    return heard


class TestOrder:
    def test_prompt_is_read_too(self, folder: Path) -> None:
        """The first token is the prompt's; each decode step computes the one behind it."""
        heard = listened(folder, "prompt_tokens = 6\noutput_tokens = 9")
        assert len(heard.needed) == 8
        for number, (found,) in enumerate(heard.needed):
            assert (found == MASKS[6 + number]).all()

    def test_text_begins_again(self, folder: Path) -> None:
        heard = listened(folder, "prompt_tokens = 40\noutput_tokens = 80")
        for number, (found,) in enumerate(heard.needed):
            assert (found == MASKS[(40 + number) % TOKENS]).all()

    def test_next_sequence_goes_on(self, folder: Path) -> None:
        """One slot: three requests in turn read the text from its beginning to token 42."""
        heard = listened(folder, SEVERAL, engine="ffn_resident = 0.5\nmax_sequences = 1")
        at = [n * 14 + 6 + step for n in range(3) for step in range(8)]
        assert len(heard.needed) == len(at)
        for token, (found,) in zip(at, heard.needed, strict=True):
            assert (found == MASKS[token]).all()

    def test_batches_are_of_different_parts(self, folder: Path) -> None:
        heard = listened(folder, SEVERAL, engine="ffn_resident = 0.5\nmax_sequences = 3")
        last = heard.needed[-1]
        for slot, found in enumerate(last):
            assert (found == MASKS[(slot * TOKENS // 3 + 6 + 7) % TOKENS]).all()

    @pytest.mark.parametrize("policy", list(Policy))
    def test_every_policy_plays_it(self, folder: Path, policy: Policy) -> None:
        made = script(folder, policy=policy, extra=PLAYED)
        figures = SimulatedRun(made, None, checker=Checker(is_thorough=True)).play()
        assert figures["tokens"] == 24
        is_mapped = policy in (Policy.MMAP, Policy.BASELINE)
        rounds = figures.get("recording_rounds")
        assert rounds == (None if is_mapped else (16 + 23) / TOKENS)

    def test_hot_neurons_are_chosen_by_it(self, folder: Path) -> None:
        """The NPU gets neurons where they are often needed, and none where they never are."""
        path = write_script(folder, extra=PLAYED, engine="ffn_resident = 1.0")
        hot = []
        for active in (0.001, 0.5, 0.95):
            write_masks(folder / "text.trace", made_up(LAYERS, TOKENS, NEURONS, active))
            made = load_script(path, {"device.npu.call_ns": 0})
            hot.append(SimulatedRun(made, None).engine.hot_neurons)
        assert hot[0] == 0 < hot[1] <= hot[2]

    def test_chances_are_the_texts(self, folder: Path) -> None:
        activity = RecordedActivity(read_trace(folder / "text.trace"))
        rates = MASKS.mean(axis=0)
        assert np.allclose(activity.needed(NEURONS), rates.mean(axis=0))
        assert np.allclose(activity.needed(NEURONS, 3), (1 - (1 - rates) ** 3).mean(axis=0))


class TestResult:
    def test_rounds_are_told(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        expect = '[[expect]]\nfigure = "recording_rounds"\nnear = 2.38\nwithin = 1e-6\n'
        path = write_script(
            folder, requests="prompt_tokens = 40\noutput_tokens = 80", extra=PLAYED + expect
        )
        assert run("simulate", path) == 0
        out = capsys.readouterr().out
        assert "shorter than what was played: 2.4 rounds of it" in out
        path = write_script(folder, extra=PLAYED)
        assert run("simulate", path) == 0
        out = capsys.readouterr().out
        assert "recording_rounds" in out and "shorter" not in out

    def test_drawn_activity_has_no_rounds(self, folder: Path) -> None:
        assert "recording_rounds" not in simulate(script(folder), None)

    def test_seeds_change_no_neuron(self, folder: Path) -> None:
        path = write_script(folder, extra=PLAYED)
        plays = [Play.load(path, {"seed": seed}, Player.SIMULATE) for seed in (1, 2)]
        first, second = play_all(plays, Player.SIMULATE)
        assert first.figures["miss_rate"] == second.figures["miss_rate"]
        assert first.timeline_sha256 != second.timeline_sha256  # slow reads are drawn

    def test_bytes_are_the_same_for_any_hash_seed(self, folder: Path) -> None:
        path = write_script(folder, extra=PLAYED, requests=SEVERAL)
        outputs = set()
        for seed in ("0", "4711"):
            trace = folder / f"{seed}.jsonl"
            done = subprocess.run(
                [sys.executable, "-m", "polyneuron", "simulate", str(path), "--json",
                 "--trace", str(trace)],
                check=True, capture_output=True, cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            outputs.add(done.stdout + trace.read_bytes())
        assert len(outputs) == 1

    def test_another_recording_gives_other_steps(self, folder: Path) -> None:
        first, second = KeptTimeline(), KeptTimeline()
        simulate(script(folder, extra=PLAYED), first)
        write_masks(folder / "text.trace", made_up(LAYERS, TOKENS, NEURONS, seed=2), 32)
        simulate(script(folder, extra=PLAYED), second)
        assert first.text() != second.text()


class TestRefused:
    def refusal(self, folder: Path, capsys: pytest.CaptureFixture[str], **changes: str) -> str:
        path = write_script(folder, **{"extra": PLAYED, **changes})
        assert run("simulate", path) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.removeprefix("polyneuron: error: ")

    def test_another_shape(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = TINY_MODEL.replace("neurons = 512", "neurons = 576")
        said = self.refusal(folder, capsys, model=model)
        assert "activity.trace" in said and f"{folder}/text.trace is of a model of 3 layers" in said
        assert "of 512 neurons, tiny has 3 of 576" in said and "profile --record" in said

    def test_experts(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "tiny-experts has experts" in self.refusal(folder, capsys, model=EXPERTS)

    def test_another_file(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """As many layers and neurons, and yet not the model that was run."""
        write_sparse_file(folder)
        write_masks(folder / "text.trace", made_up(sparse_files.LAYERS, 40, sparse_files.NEURONS))
        said = self.refusal(folder, capsys, model='[model]\nfile = "sparse.ncf"\n')
        assert "activity.trace" in said and "is of another file than" in said
        assert "record it with polyneuron profile --record" in said

    def test_damage_and_cuts(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = folder / "text.trace"
        whole = path.read_bytes()
        for data, complaint in (
            (whole[:-5], "cut off"), (whole[:-1] + b"\xff", "does not match"), (b"GGUF", "not a r"),
        ):  # fmt: skip
            path.write_bytes(data)
            said = self.refusal(folder, capsys)
            assert said.startswith(f"{path}: ") and complaint in said and "--record" in said

    def test_no_file(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = self.refusal(folder, capsys, extra='[activity]\ntrace = "none.trace"\n')
        assert f"{folder}/none.trace" in said and "profile --record" in said
        said = self.refusal(folder, capsys, extra="[activity]\ntrace = 7\n")
        assert "activity.trace is 7" in said

    def test_statistics_beside_it(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = self.refusal(folder, capsys, extra=PLAYED + "overlap = 0.3\n")
        assert "activity.overlap" in said and "leave one out" in said

    def test_another_hot_set(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        event = '[[events]]\nat_token = 3\ndo = "shift_hot_set"\nshare = 0.3\n'
        said = self.refusal(folder, capsys, extra=PLAYED + event)
        assert "events" in said and "shift_hot_set" in said
