"""Best-of-N on actors: the likeliest of several answers, and every way in which it may end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron import Completion, Engine, Generation, SamplingParams
from polyneuron.errors import ConfigError, EngineError
from tests.support.engines import CONFIG, GREEDY, LONG_PROMPT, PROMPT, open_engine, write_model
from tests.support.leftovers import wait_until

pytestmark = pytest.mark.ray

DRAWN = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=11)
MANY = CONFIG.max_sequences


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = write_model(tmp_path_factory.mktemp("model"))
    with open_engine(path) as opened:
        yield opened


def answer(engine: Engine, best_of: int = 1, **options: object) -> Completion:
    defaults = {"prompt": PROMPT, "max_tokens": 30, "sampling": DRAWN, "ignore_eos": True}
    return engine.generate(best_of=best_of, **{**defaults, **options})


def endless(engine: Engine, **options: object) -> Generation:
    return engine.stream(PROMPT, sampling=DRAWN, ignore_eos=True, best_of=MANY, **options)


def same(one: Completion, other: Completion) -> bool:
    return (one.text, one.tokens, one.logits_sha256) == (
        other.text,
        other.tokens,
        other.logits_sha256,
    )


def busy_workers(engine: Engine) -> list[int]:
    """Places of the CPU workers that are inside a step."""
    return [i for i in range(2) if engine.actors.arena.executor(i).busy_seq]


def assert_all_free(engine: Engine) -> None:
    """As many requests as there may be are accepted, and run."""
    streams = [engine.stream([3], max_tokens=1) for _ in range(CONFIG.max_requests)]
    with pytest.raises(EngineError, match="try again later"):
        endless(engine)
    for stream in streams:
        stream.close()
    assert len(answer(engine).tokens) == 30


class TestChoice:
    def test_likeliest_of_all_seeds_is_given(self, engine: Engine) -> None:
        """Each candidate is what its seed gives alone; the best of them is the answer."""
        best = answer(engine, MANY)
        alone = [answer(engine, sampling=replace(DRAWN, seed=DRAWN.seed + i)) for i in range(MANY)]
        means = [np.mean(engine.score(PROMPT + one.tokens, len(PROMPT) - 1)) for one in alone]
        assert best.best_of is not None
        assert best.best_of.chosen == int(np.argmax(means))
        assert same(best, alone[best.best_of.chosen])
        found = [candidate.mean_logprob for candidate in best.best_of.candidates]
        np.testing.assert_allclose(found, means, atol=1e-9)
        assert best.batch_sizes == [(1, MANY)]
        assert best.timings.prompt_n == len(PROMPT)

    def test_equals_give_the_first(self, engine: Engine) -> None:
        best = answer(engine, 3, sampling=GREEDY)
        assert best.best_of is not None
        assert best.best_of.chosen == 0
        assert len({candidate.mean_logprob for candidate in best.best_of.candidates}) == 1
        assert same(best, answer(engine, sampling=GREEDY))

    def test_one_candidate_is_a_plain_request(self, engine: Engine) -> None:
        one = answer(engine, 1)
        assert one.best_of is None
        assert one.batch_sizes == [(1, 1)]

    def test_text_comes_at_once(self, engine: Engine) -> None:
        stream = engine.stream(PROMPT, max_tokens=30, sampling=DRAWN, best_of=2)
        assert list(stream) == [stream.completion.text]
        assert list(stream) == []

    def test_no_token_wanted(self, engine: Engine) -> None:
        best = answer(engine, 2, max_tokens=0)
        assert best.best_of is not None
        assert (best.text, best.tokens, best.finish_reason) == ("", [], "length")
        assert [c.mean_logprob for c in best.best_of.candidates] == [None, None]

    def test_stop_strings_end_each_by_itself(self, engine: Engine) -> None:
        whole = [
            answer(engine, max_tokens=200, sampling=replace(DRAWN, seed=DRAWN.seed + i))
            for i in range(3)
        ]
        stop = whole[1].text[20:22]
        best = answer(engine, 3, max_tokens=200, stop=stop)
        assert best.best_of is not None
        for one, candidate in zip(whole, best.best_of.candidates, strict=True):
            is_stopped = stop in one.text
            assert candidate.finish_reason == ("stop" if is_stopped else "length")
            scores = engine.score(PROMPT + one.tokens, len(PROMPT) - 1)[: candidate.num_tokens]
            assert candidate.mean_logprob == pytest.approx(np.mean(scores), abs=1e-9)
        chosen = whole[best.best_of.chosen]
        assert best.text == chosen.text.partition(stop)[0]

    def test_company_changes_nothing(self, engine: Engine) -> None:
        """More candidates than run at once, beside others: all wait for their turn."""
        expected = [answer(engine, n, prompt=PROMPT[n:]) for n in (3, 1, 4, 2)]
        streams = [
            engine.stream(PROMPT[n:], max_tokens=30, sampling=DRAWN, ignore_eos=True, best_of=n)
            for n in (3, 1, 4, 2)
        ]
        for stream, one in zip(streams, expected, strict=True):
            assert same(stream.wait(), one)


class TestEnds:
    @pytest.mark.parametrize(
        ("best_of", "message"),
        [
            (0, "best_of is 0: must be a whole number, 1 or more"),
            (1.5, r"best_of is 1\.5: must be a whole number"),
            (5, "best_of is 5: this engine's max_sequences is 4; open it with max_sequences=5"),
        ],
    )
    def test_bad_number_is_refused(self, engine: Engine, best_of: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            answer(engine, best_of)
        assert_all_free(engine)

    @pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT])
    def test_left_and_closed_ones_free_their_places(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        """Also while the prompt is computed, which then nobody goes on with."""
        for _ in range(4):
            stream = engine.stream(prompt, sampling=DRAWN, ignore_eos=True, best_of=MANY)
            stream.close()
            stream.close()
            assert list(stream) == []
            with pytest.raises(EngineError, match="was left before its end"):
                _ = stream.completion
            endless(engine)
        assert_all_free(engine)

    def test_cancelled_one_gives_the_best_so_far(self, engine: Engine) -> None:
        stream = endless(engine)
        while not busy_workers(engine):
            assert not stream.is_finished
        stream.cancel()
        best = stream.wait()
        assert best.finish_reason == "cancelled"
        assert best.best_of is not None
        assert {c.finish_reason for c in best.best_of.candidates} == {"cancelled"}
        assert_all_free(engine)

    def test_cancelled_task_frees_its_places(self, engine: Engine) -> None:
        async def cancel() -> None:
            options = {"sampling": DRAWN, "ignore_eos": True, "best_of": MANY}
            task = asyncio.create_task(engine.agenerate(PROMPT, **options))
            while not busy_workers(engine):
                assert not task.done()
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert_all_free(engine)

    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    @pytest.mark.parametrize(("prompt", "limit"), [(PROMPT, 1200), (LONG_PROMPT, 200)])
    def test_lost_worker_changes_nothing(
        self, engine: Engine, prompt: list[int], limit: int, fault: signal.Signals
    ) -> None:
        undisturbed = answer(engine, MANY, prompt=prompt, max_tokens=limit)
        stream = engine.stream(
            prompt, max_tokens=limit, sampling=DRAWN, ignore_eos=True, best_of=MANY
        )
        while not (busy := busy_workers(engine)):
            assert not stream.is_finished
        record = engine.actors.arena.executor(busy[0])
        pid = int(record.pid)
        os.kill(pid, fault)
        assert not stream.is_finished, "the fault came too late to prove anything"
        best = stream.wait()
        assert same(best, undisturbed)
        assert best.best_of == undisturbed.best_of
        wait_until(lambda: record.pid not in (0, pid), "another process has the place")
