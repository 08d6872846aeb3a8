"""Simulated runs: what must hold whatever is simulated, and that a seed decides everything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyneuron.errors import ConfigError
from polyneuron.scenarios.checkers import Checker
from polyneuron.scenarios.engine_settings import Policy
from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.script import Script
from polyneuron.scenarios.simulated_engine import SimulatedEngine, StepOutcome
from polyneuron.scenarios.simulation import SimulatedRun, simulate
from polyneuron.scenarios.timeline_sink import KeptTimeline
from tests.support.simulated import EXPERTS, ROOT, TINY_MODEL, script

EVENTS = """
[[events]]
at_token = 3
do = "shrink_memory"
ffn_resident = 0.2
[[events]]
at_token = 6
do = "grow_memory"
ffn_resident = 0.7
[[events]]
at_token = 8
do = "shift_hot_set"
share = 0.3
[[events]]
at_token = 9
do = "slow_flash"
factor = 4.0
for_tokens = 5
[[events]]
at_token = 10
do = "stall_flash"
ms = 3.0
every = 4
[[events]]
at_token = 12
do = "throttle"
cpu = 0.5
[[events]]
at_token = 14
do = "lose_worker"
worker = 1
[[events]]
at_token = 16
do = "fail_read"
count = 3
"""

TELL_ALL = """
import sys
from pathlib import Path
from polyneuron.scenarios.script import load_script
from polyneuron.scenarios.simulated_engine import SimulatedEngine, StepOutcome
from polyneuron.scenarios.simulation import simulate
from polyneuron.scenarios.timeline_sink import KeptTimeline, sha256_of
for folder in sys.argv[1:]:
    sink = KeptTimeline()
    figures = simulate(load_script(Path(folder) / "tried.toml"), sink)
    print(sha256_of(sink.text()), sorted(figures.items(), key=str))
"""


def checked(made: Script, is_thorough: bool = True) -> tuple[Figures, Checker]:
    """The figures of a run of which every step was looked at."""
    checker = Checker(is_thorough)
    return SimulatedRun(made, None, checker=checker).play(), checker


class TestInvariants:
    @pytest.mark.parametrize("policy", list(Policy))
    @pytest.mark.parametrize("model", [TINY_MODEL, EXPERTS], ids=["dense", "experts"])
    def test_rules_hold_for_every_policy(self, policy: Policy, model: str, tmp_path: Path) -> None:
        made = script(tmp_path, policy=policy, model=model, extra=EVENTS)
        figures, checker = checked(made)
        assert checker.num_steps == 23
        assert figures["requests_finished"] == 1
        assert figures["tokens"] == 24

    @pytest.mark.parametrize("seed", range(8))
    def test_rules_hold_for_every_seed(self, seed: int, tmp_path: Path) -> None:
        requests = "prompt_tokens = 20\noutput_tokens = 12\nbest_of = 3\nends_every = 3\n"
        later = "[[requests]]\nat_token = 7\nprompt_tokens = 40\noutput_tokens = 9\ncount = 3\n"
        made = script(
            tmp_path, seed=seed, requests=requests, extra=later + EVENTS,
            engine=f"ffn_resident = {0.1 + 0.1 * seed}\nmax_sequences = 3",
        )  # fmt: skip
        figures, _ = checked(made)
        assert figures["requests_finished"] == 4
        assert figures["tokens"] == 12 + 6 + 3 + 3 * 9

    def test_memory_changes_keep_every_request(self, tmp_path: Path) -> None:
        figures, _ = checked(script(tmp_path, extra=EVENTS))
        assert figures["requests_failed"] == 0
        assert figures["restarts"] == 1


class TestCosts:
    def test_slow_flash_slows_only_what_reads(self, tmp_path: Path) -> None:
        slow = '[[events]]\nat_token = 1\ndo = "slow_flash"\nfactor = 20.0\n'
        for share, grows in ((0.3, True), (1.0, False)):
            engine = f"ffn_resident = {share}"
            plain = simulate(script(tmp_path, engine=engine), None)["decode_tok_s"]
            slowed = simulate(script(tmp_path, engine=engine, extra=slow), None)["decode_tok_s"]
            assert plain and slowed
            assert (slowed < plain * 0.8) is grows
            assert grows or slowed == plain

    def test_more_memory_is_never_slower(self, tmp_path: Path) -> None:
        speeds = [
            simulate(script(tmp_path, policy="pipeline", engine=f"ffn_resident = {share}"), None)
            for share in (0.1, 0.3, 0.6, 1.0)
        ]
        decode = [figures["decode_tok_s"] or 0.0 for figures in speeds]
        assert decode == sorted(decode) and decode[0] < decode[-1]

    def test_neurons_of_one_read_are_read_once(self, tmp_path: Path) -> None:
        """No second phase where the first read brings all of a neuron."""
        model = TINY_MODEL.replace("second_read = 256", "second_read = 0")
        made = script(tmp_path, policy="pipeline", model=model, engine="ffn_resident = 0.3")
        seen: list[tuple[int, int]] = []

        class Counter(Checker):
            def step_done(self, engine: SimulatedEngine, outcome: StepOutcome) -> None:
                seen.append((outcome.totals.reads, outcome.totals.misses))

        SimulatedRun(made, None, checker=Counter()).play()
        assert sum(misses for _, misses in seen) > 0
        assert all(reads <= misses for reads, misses in seen)

    def test_persistent_failure_ends_requests_only(self, tmp_path: Path) -> None:
        broken = '[[events]]\nat_token = 4\ndo = "fail_read"\npersistent = true\n'
        figures = simulate(script(tmp_path, engine="ffn_resident = 0.2", extra=broken), None)
        assert figures["requests_failed"] == 1
        assert 4 <= (figures["tokens"] or 0) < 24

    def test_lost_worker_costs_a_restart(self, tmp_path: Path) -> None:
        lost = '[[events]]\nat_token = 4\ndo = "lose_worker"\n'
        plain, hurt = (simulate(script(tmp_path, extra=e), None) for e in ("", lost))
        assert plain["restarts"] == 0 and hurt["restarts"] == 1
        assert (hurt["token_ms_p99"] or 0) > (plain["token_ms_p99"] or 0) + 1000

    def test_too_long_a_request_is_refused(self, tmp_path: Path) -> None:
        requests = "prompt_tokens = 250\noutput_tokens = 20"
        with pytest.raises(ConfigError, match="context is 256"):
            simulate(script(tmp_path, requests=requests), None)


class TestDeterminism:
    def timeline(self, made: Script) -> bytes:
        sink = KeptTimeline()
        simulate(made, sink)
        return sink.text()

    def test_seed_decides_the_timeline(self, tmp_path: Path) -> None:
        first = self.timeline(script(tmp_path, extra=EVENTS, seed=5))
        assert first == self.timeline(script(tmp_path, extra=EVENTS, seed=5))
        assert first != self.timeline(script(tmp_path, extra=EVENTS, seed=6))

    def test_hash_seed_changes_nothing(self, tmp_path: Path) -> None:
        policies = ("powerinfer2", "llmflash", "mmap")
        for policy in policies:
            (tmp_path / policy).mkdir()
            script(tmp_path / policy, model=EXPERTS, policy=policy, extra=EVENTS)
        command = [sys.executable, "-c", TELL_ALL, *(str(tmp_path / p) for p in policies)]
        outputs = [
            subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            ).stdout
            for seed in ("0", "4711")
        ]  # fmt: skip
        assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == len(policies)
