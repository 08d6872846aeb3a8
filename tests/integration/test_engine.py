"""The engine on its actors: what a user of the Python interface may count on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyneuron import Completion, Engine, SamplingParams
from polyneuron.errors import ConfigError, ContextError, EngineError
from tests.support.engines import CONFIG, GREEDY, LONG_PROMPT, PROMPT, open_engine, write_model
from tests.support.local_engine import LocalEngine

pytestmark = pytest.mark.ray

DRAWN = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=11)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with open_engine(path) as opened:
        yield opened


def greedy(engine: Engine, prompt: list[int] = PROMPT, max_tokens: int = 40) -> Completion:
    return engine.generate(prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True)


class TestGenerate:
    def test_tokens_equal_the_local_engine(self, engine: Engine, path: Path) -> None:
        """The same step program without Ray gives the same."""
        with LocalEngine(path, num_ctx=2048) as local:
            expected = local.generate(PROMPT, 40).tokens
        assert greedy(engine).tokens == expected

    def test_pieces_join_to_the_text(self, engine: Engine) -> None:
        stream = engine.stream("hello world", max_tokens=60, sampling=DRAWN, ignore_eos=True)
        pieces = list(stream)
        assert len(pieces) > 10
        assert "".join(pieces) == stream.completion.text
        assert len(stream.completion.tokens) == 60
        again = engine.generate("hello world", max_tokens=60, sampling=DRAWN, ignore_eos=True)
        assert again.text == stream.completion.text

    def test_stop_string_ends_the_text_before_it(self, engine: Engine) -> None:
        whole = engine.generate("hello", max_tokens=60, sampling=DRAWN, ignore_eos=True)
        stop = whole.text[8:11]
        for given in (stop, [stop], ["not there at all", stop]):
            cut = engine.generate(
                "hello", max_tokens=60, sampling=DRAWN, ignore_eos=True, stop=given
            )
            assert cut.finish_reason == "stop"
            assert cut.text == whole.text[: whole.text.index(stop)]

    def test_end_token_stops_without_text(self, engine: Engine) -> None:
        """The end token is the last of the tokens and no part of the text."""
        sampling = SamplingParams(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
        ended = engine.generate("hello", max_tokens=2000, sampling=sampling)
        assert ended.finish_reason == "stop"
        assert ended.tokens[-1] in engine.tokenizer.end_ids
        assert "<|im_end|>" not in ended.text

    def test_no_token_wanted(self, engine: Engine) -> None:
        empty = greedy(engine, max_tokens=0)
        assert (empty.tokens, empty.text, empty.finish_reason) == ([], "", "length")

    def test_one_token_wanted(self, engine: Engine) -> None:
        one = greedy(engine, max_tokens=1)
        assert one.tokens == greedy(engine).tokens[:1]
        assert one.finish_reason == "length"

    def test_full_context_ends_with_length(self, engine: Engine) -> None:
        prompt = (LONG_PROMPT * 2)[: CONFIG.num_ctx - 5]
        for max_tokens in (-1, 5, 100):
            full = greedy(engine, prompt, max_tokens)
            assert (len(full.tokens), full.finish_reason) == (5, "length")

    def test_long_prompt_is_refused_with_both_numbers(self, engine: Engine) -> None:
        prompt = (LONG_PROMPT * 2)[: CONFIG.num_ctx]
        with pytest.raises(ContextError, match=r"has 2048 tokens, the context 2048.*-c"):
            engine.generate(prompt)

    def test_log_probabilities_are_of_the_tokens(self, engine: Engine) -> None:
        result = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY, top_logprobs=3)
        assert [row[0][0] for row in result.top_logprobs] == result.tokens
        for row in result.top_logprobs:
            values = [value for _, value in row]
            assert len(row) == 3
            assert values == sorted(values, reverse=True)
            assert all(value <= 0 for value in values)

    def test_seed_gives_the_same_text(self, engine: Engine) -> None:
        def drawn(seed: int) -> list[int]:
            sampling = SamplingParams(temperature=1.5, seed=seed)
            return engine.generate(PROMPT, max_tokens=30, sampling=sampling).tokens

        assert drawn(1) == drawn(1)
        assert drawn(1) != drawn(2)

    def test_chat_uses_the_template(self, engine: Engine) -> None:
        messages = [{"role": "user", "content": "hello"}]
        chat = engine.chat(messages, max_tokens=5, sampling=GREEDY)
        text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert chat.wait().prompt_tokens == engine.tokenize(text, add_bos=False)

    def test_score_is_the_tokens_log_probability(self, engine: Engine) -> None:
        result = engine.generate(PROMPT, max_tokens=6, sampling=GREEDY, top_logprobs=1)
        scores = engine.score(PROMPT + result.tokens, len(PROMPT) - 1)
        expected = [row[0][1] for row in result.top_logprobs]
        np.testing.assert_allclose(scores, expected, atol=1e-9)

    def test_score_of_last_token_is_empty(self, engine: Engine) -> None:
        assert engine.score(PROMPT, len(PROMPT) - 1) == []

    def test_figures_are_counted(self, engine: Engine) -> None:
        timings = greedy(engine).timings
        assert (timings.prompt_n, timings.predicted_n) == (len(PROMPT), 40)
        assert timings.prompt_ms > 0
        assert timings.predicted_ms > 0
        assert timings.load_ms > 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "options", "message"),
        [
            ([], {}, "the prompt is empty"),
            ([3, 299], {}, "prompt token 299 is not in the vocabulary of 299"),
            ([3, -1], {}, "prompt token -1 is not in the vocabulary"),
            ([3.5], {}, "text or a sequence of token ids"),
            ([3], {"max_tokens": -2}, "max_tokens is -2: must be a whole number, -1 or more"),
            ([3], {"max_tokens": 1.5}, r"max_tokens is 1\.5: must be a whole number"),
            ([3], {"top_logprobs": -1}, "top_logprobs is -1: .* from 0 to 299"),
            ([3], {"top_logprobs": 300}, "top_logprobs is 300"),
            ([3], {"stop": [""]}, "a stop string is empty"),
        ],
    )
    def test_bad_request_is_refused(
        self, engine: Engine, prompt: list[int], options: dict[str, object], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            engine.generate(prompt, **options)
        assert len(greedy(engine).tokens) == 40

    @pytest.mark.parametrize("first", [-1, 40])
    def test_score_outside_the_text_is_refused(self, engine: Engine, first: int) -> None:
        with pytest.raises(ConfigError, match=f"first is {first}: .* from 0 to 39"):
            engine.score(PROMPT, first)

    def test_second_engine_is_refused(self, engine: Engine, path: Path) -> None:
        with pytest.raises(ConfigError, match="close the engine that is open"):
            open_engine(path)
        assert len(greedy(engine).tokens) == 40

    def test_unknown_setting_is_refused(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="num_wrkers"):
            open_engine(path, num_wrkers=2)

    def test_too_many_executors_are_refused(self, path: Path) -> None:
        with pytest.raises(ConfigError, match=r"40 workers and 25 NPU threads: .* 64"):
            open_engine(path, num_workers=40, num_npu_threads=25)

    def test_longer_context_than_trained_is_refused(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="-c 4097: the model was trained for 4096"):
            open_engine(path, num_ctx=4097)


def num_free(engine: Engine) -> int:
    """How many more requests the engine accepts now."""
    with contextlib.ExitStack() as opened:
        for count in range(CONFIG.max_requests + 1):
            try:
                stream = engine.stream([3], max_tokens=1)
            except EngineError:
                return count
            opened.callback(stream.close)
    raise AssertionError("there is no bound on the number of requests")


class TestRequests:
    def test_streams_together_equal_streams_alone(self, engine: Engine) -> None:
        prompts = [PROMPT[i:] for i in range(6)]  # more than run at once
        alone = [greedy(engine, prompt) for prompt in prompts]
        streams = [
            engine.stream(p, max_tokens=40, sampling=GREEDY, ignore_eos=True) for p in prompts
        ]
        together = [stream.wait() for stream in streams]
        assert [c.tokens for c in together] == [c.tokens for c in alone]
        assert [c.logits_sha256 for c in together] == [c.logits_sha256 for c in alone]

    def test_threads_may_share_an_engine(self, engine: Engine) -> None:
        expected = greedy(engine).tokens
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: found.append(greedy(engine).tokens)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [expected] * 8

    def test_cancelled_stream_ends(self, engine: Engine) -> None:
        stream = engine.stream(PROMPT, sampling=GREEDY, ignore_eos=True)
        pieces = iter(stream)
        first = next(pieces)
        stream.cancel()
        rest = list(pieces)
        assert stream.completion.finish_reason == "cancelled"
        assert stream.completion.text == first + "".join(rest)
        assert len(stream.completion.tokens) < CONFIG.num_ctx - len(PROMPT)

    def test_left_streams_free_their_place(self, engine: Engine) -> None:
        """Left after one piece, never looked at, closed twice, cancelled and left."""
        for _ in range(20):
            for _piece in engine.stream(PROMPT, sampling=GREEDY, ignore_eos=True):
                break
            engine.stream(PROMPT, sampling=GREEDY, ignore_eos=True)
            stream = engine.stream(PROMPT, sampling=GREEDY, ignore_eos=True)
            stream.close()
            stream.close()
            engine.stream(PROMPT, ignore_eos=True).cancel()
        assert num_free(engine) == CONFIG.max_requests
        assert len(greedy(engine).tokens) == 40

    def test_left_stream_has_no_completion(self, engine: Engine) -> None:
        stream = engine.stream(PROMPT, ignore_eos=True)
        with pytest.raises(EngineError, match="still runs"):
            _ = stream.completion
        stream.close()
        assert list(stream) == []
        with pytest.raises(EngineError, match="was left before its end"):
            _ = stream.completion

    def test_ended_stream_may_be_asked_again(self, engine: Engine) -> None:
        stream = engine.stream(PROMPT, max_tokens=5, sampling=GREEDY)
        first = stream.wait()
        greedy(engine)  # takes the same mailbox
        assert list(stream) == []
        assert stream.wait() is first

    def test_one_more_request_is_refused(self, engine: Engine) -> None:
        assert num_free(engine) == CONFIG.max_requests
        assert len(greedy(engine).tokens) == 40


class TestAsyncio:
    def test_completions_run_together(self, engine: Engine) -> None:
        async def both() -> list[Completion]:
            requests = [
                engine.agenerate(PROMPT[i:], max_tokens=20, sampling=GREEDY) for i in range(3)
            ]
            return list(await asyncio.gather(*requests))

        found = asyncio.run(both())
        expected = [engine.generate(PROMPT[i:], max_tokens=20, sampling=GREEDY) for i in range(3)]
        assert [c.tokens for c in found] == [c.tokens for c in expected]

    def test_pieces_come_one_by_one(self, engine: Engine) -> None:
        async def collect() -> list[str]:
            return [p async for p in engine.astream("hello", max_tokens=20, sampling=DRAWN)]

        whole = engine.generate("hello", max_tokens=20, sampling=DRAWN)
        assert "".join(asyncio.run(collect())) == whole.text

    def test_left_stream_frees_its_place(self, engine: Engine) -> None:
        async def leave() -> None:
            stream = engine.astream(PROMPT, sampling=GREEDY, ignore_eos=True)
            async for _piece in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        asyncio.run(leave())
        assert num_free(engine) == CONFIG.max_requests

    @pytest.mark.parametrize("kind", ["agenerate", "astream"])
    def test_cancelled_task_frees_its_place(self, engine: Engine, kind: str) -> None:
        async def use() -> None:
            if kind == "agenerate":
                await engine.agenerate(PROMPT, sampling=GREEDY, ignore_eos=True)
            else:
                async for _piece in engine.astream(PROMPT, sampling=GREEDY, ignore_eos=True):
                    pass

        async def cancel() -> None:
            task = asyncio.create_task(use())
            record = engine.actors.arena.executor(0)
            while record.busy_seq == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert num_free(engine) == CONFIG.max_requests
