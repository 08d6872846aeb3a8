"""The public facade: open a model, generate, close.

with Engine("smollm2") as engine:
    print(engine.generate("The capital of France is", max_tokens=16).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from polyneuron.actors.cluster import ClusterConfig, PrivateCluster
from polyneuron.actors.messages import RequestOutcome, SubmitRequest
from polyneuron.actors.sequence_run import Mailbox
from polyneuron.completion import Completion, timings_of
from polyneuron.config import DEFAULT_NUM_CTX, EngineConfig, usable_cores
from polyneuron.errors import ConfigError, ContextError, EngineError
from polyneuron.io.gguf_file import GgufHeader, check_supported, read_header
from polyneuron.io.weight_reader import ReadReport
from polyneuron.model.architecture import describe
from polyneuron.model.chat_template import ChatTemplate
from polyneuron.model.locate import locate_model
from polyneuron.model.sampling import SamplingParams
from polyneuron.model.spec import ModelSpec
from polyneuron.model.stream import StopMatcher, StreamDecoder
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.planning.layout import ArenaLayout, plan_layout

WAIT_SLICE_NS = 500_000_000
LOAD_SLICE_S = 0.1
Prompt = str | Sequence[int]
LoadProgress = Callable[[int, int], None]
"""Called with bytes read so far and bytes to read."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory in use, in bytes; shared pages counted once (PSS)."""

    total_bytes: int
    ray_bytes: int
    arena_bytes: int


def resolve_config(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Fill in what was left automatic, and refuse what the model cannot do."""
    if config.num_ctx > spec.context_length:
        raise ConfigError(
            f"-c {config.num_ctx}: the model was trained for {spec.context_length} positions; "
            f"give at most that"
        )
    workers = config.num_workers or len(usable_cores())
    return replace(
        config,
        num_ctx=config.num_ctx or min(spec.context_length, DEFAULT_NUM_CTX),
        num_workers=workers,
        num_npu_threads=workers if config.num_npu_threads < 0 else config.num_npu_threads,
    )


class Generation:
    """A running request: iterate over its text as it comes, then read `completion`."""

    def __init__(self, engine: Engine, request: SubmitRequest, stops: Sequence[str]) -> None:
        self._engine, self._request = engine, request
        self._mailbox = engine.mailbox(request.mailbox)
        self._decoder = StreamDecoder(engine.tokenizer)
        self._stops = StopMatcher(stops)
        self._request_has_stops = bool(stops)
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; cancels the request when left early."""
        try:
            while True:
                finished = self._mailbox.finished
                for token_id in self._mailbox.tokens_from(len(self._tokens)):
                    piece = self._take(token_id)
                    if piece:
                        yield piece
                    if self._stops.matched is not None:
                        self._engine.cancel(self._request.request_id)
                        yield from self._finish()
                        return
                if finished:
                    yield from self._finish()
                    return
                self._mailbox.wait_more(len(self._tokens), WAIT_SLICE_NS)
                self._engine.check_alive()
        finally:
            if self._completion is None:
                self._engine.cancel(self._request.request_id)
                self._engine.take_outcome(self._request)

    def _take(self, token_id: int) -> str:
        self._tokens.append(token_id)
        if token_id in self._request.end_ids:
            return ""
        piece = self._stops.push(self._decoder.push(token_id))
        self._pieces.append(piece)
        return piece

    def _finish(self) -> Iterator[str]:
        stopped = self._stops.matched is not None
        rest = "" if stopped else self._stops.push(self._decoder.flush()) + self._stops.flush()
        if rest:
            self._pieces.append(rest)
            yield rest
        outcome = self._engine.take_outcome(self._request)
        self._completion = Completion(
            text="".join(self._pieces),
            prompt_tokens=list(self._request.prompt),
            tokens=self._tokens,
            finish_reason="stop" if stopped else outcome.finish_reason,
            logits_sha256=outcome.logits_sha256,
            top_logprobs=outcome.top_logprobs,
            timings=timings_of(outcome, self._engine.load_ms, len(self._tokens)),
        )

    def cancel(self) -> None:
        """Ask for the end; the iteration ends soon after."""
        self._engine.cancel(self._request.request_id)

    @property
    def completion(self) -> Completion:
        """The result; raises EngineError while the request still runs."""
        if self._completion is None:
            raise EngineError("the request still runs: iterate over it to its end first")
        return self._completion

    def wait(self) -> Completion:
        """Run to the end without looking at each token."""
        if not self._request_has_stops:
            while not self._mailbox.finished:
                self._mailbox.wait_finished(WAIT_SLICE_NS)
                self._engine.check_alive()
        for _ in self:
            pass
        return self.completion


class Engine:
    """One open model on its own private Ray cluster; one at a time in a process."""

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        on_load: LoadProgress | None = None,
        **settings: Any,
    ) -> None:
        started = time.monotonic()
        self.header: GgufHeader = read_header(locate_model(model))
        check_supported(self.header)
        self.spec = describe(self.header)
        self.tokenizer = Tokenizer.from_metadata(self.header.metadata, self.header.path.name)
        base = config or EngineConfig()
        try:
            base = replace(base, **settings)
        except TypeError as error:
            raise ConfigError(f"Engine: {error}") from None
        self.config = resolve_config(base, self.spec)
        self.layout: ArenaLayout = plan_layout(self.header, self.spec, self.config)
        self._lock = threading.Lock()
        self._next_id = 1
        self._mailboxes = list(range(self.config.max_requests - 1, -1, -1))
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as cleanup:
            self._start(cleanup, on_load)
            self._cleanup = cleanup.pop_all()
        self.load_ms = (time.monotonic() - started) * 1e3

    def _start(self, cleanup: contextlib.ExitStack, on_load: LoadProgress | None) -> None:
        # Imported late: importing Ray takes half a second and reads the environment.
        from polyneuron.actors.arena import object_bytes

        cluster_config = ClusterConfig(object_bytes(self.layout))
        self.cluster = cleanup.enter_context(PrivateCluster(cluster_config))
        from polyneuron.actors import launch

        self._launch = launch
        self.actors = launch.launch(self.header.path, self.spec, self.layout, usable_cores())
        cleanup.callback(self.actors.stop)
        self.read_report = self._load(on_load)

    def _load(self, on_load: LoadProgress | None) -> ReadReport:
        total = sum(place.tensor.num_bytes for place in self.layout.weights.values())
        counter = self.actors.arena.view(self.layout.at("inputs.bytes_read"), (1,), "u8")
        ref = self._launch.load(self.actors)
        while (report := self._launch.take_report(ref, LOAD_SLICE_S)) is None:
            if on_load:
                on_load(int(counter[0]), total)
        if on_load:
            on_load(total, total)
        return report

    # ---- requests

    def tokenize(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of raw text; control tokens in it count as such."""
        return self.tokenizer.encode(text, add_bos=add_bos, parse_special=True)

    def _submit(self, **fields: Any) -> SubmitRequest:
        with self._lock:
            if not self._mailboxes:
                raise EngineError(
                    f"{self.config.max_requests} requests are running or waiting: try again later"
                )
            mailbox, request_id = self._mailboxes.pop(), self._next_id
            self._next_id += 1
        self.mailbox(mailbox).clear()
        request = SubmitRequest(request_id=request_id, mailbox=mailbox, **fields)
        self._launch.call(self.actors.coordinator.submit, request.pack())
        return request

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens that fit behind the prompt; at least 1, or ContextError with both numbers."""
        if not prompt:
            raise ConfigError("the prompt is empty: give at least one token")
        room = self.config.num_ctx - len(prompt)
        if room < 1:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens, the context {self.config.num_ctx}: shorten "
                f"it, or enlarge the context with -c (the model allows {self.spec.context_length})"
            )
        bad = [token for token in prompt if not 0 <= token < self.spec.vocab_size]
        if bad:
            raise ConfigError(
                f"prompt token {bad[0]} is not in the vocabulary of {self.spec.vocab_size}"
            )
        return room

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = -1,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int = 0,
        ignore_eos: bool = False,
    ) -> Generation:
        """Start a request; `max_tokens` -1: until the model ends or the context is full."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        room = self._room(tokens)
        if max_tokens < -1:
            raise ConfigError(f"max_tokens is {max_tokens}: give 0 or more, or -1 for no limit")
        request = self._submit(
            prompt=tokens,
            max_tokens=min(max_tokens, room) if max_tokens >= 0 else room,
            sampling=asdict(sampling or SamplingParams()),
            end_ids=[] if ignore_eos else sorted(self.tokenizer.end_ids),
            top_logprobs=top_logprobs,
            hash_logits=self.config.deterministic,
        )
        return Generation(self, request, stop)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Run one request to its end; options as for `stream`."""
        return self.stream(prompt, **options).wait()

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a conversation by the model's own template; options as for `stream`."""
        return self.stream(self.encode_chat(messages), **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        template = ChatTemplate.from_metadata(self.header.metadata, self.header.path.name)
        return template.encode_chat(self.tokenizer, messages)

    def score(self, tokens: Sequence[int], first: int) -> list[float]:
        """Log-probabilities of tokens first+1, first+2, … given all before each."""
        if len(tokens) > self.config.num_ctx:
            raise ContextError(
                f"{len(tokens)} tokens to score, the context has {self.config.num_ctx}"
            )
        request = self._submit(prompt=list(tokens), max_tokens=0, score_from=first)
        mailbox = self.mailbox(request.mailbox)
        while not mailbox.finished:
            mailbox.wait_finished(WAIT_SLICE_NS)
            self.check_alive()
        return self.take_outcome(request).scores

    async def agenerate(self, prompt: Prompt, **options: Any) -> Completion:
        """`generate` for asyncio."""
        return await asyncio.to_thread(self.generate, prompt, **options)

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """`stream` for asyncio: pieces of text; leaving early cancels the request."""
        pieces = iter(await asyncio.to_thread(self.stream, prompt, **options))
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(getattr(pieces, "close", lambda: None))

    # ---- used by Generation

    def mailbox(self, index: int) -> Mailbox:
        """The mailbox of that number."""
        return Mailbox(self.actors.arena, self.layout, index)

    def cancel(self, request_id: int) -> None:
        """End a request soon; an ended one is no error."""
        self._launch.call(self.actors.coordinator.cancel, request_id)

    def check_alive(self) -> None:
        """Raise EngineError when the coordinator's loop has ended."""
        self._launch.check_running(self.actors)

    def take_outcome(self, request: SubmitRequest) -> RequestOutcome:
        """The outcome of an ended request; frees its mailbox."""
        descriptor = self._launch.call(self.actors.coordinator.take_outcome, request.request_id)
        with self._lock:
            self._mailboxes.append(request.mailbox)
        outcome = RequestOutcome.unpack(descriptor)
        if outcome.error is not None:
            raise EngineError(outcome.error)
        return outcome

    # ---- reports

    def mode_line(self) -> str:
        """How this engine runs, in one line, before the first token."""
        mib = sum(place.num_bytes for place in self.layout.weights.values()) / 2**20
        npu = self.config.num_npu_threads
        parts = [
            "dense",
            f"in memory {mib:.0f} MiB of weights",
            f"npu=native({npu}t, modelled, prefill)" if npu else "npu=none",
            f"cpu {self.config.num_workers} workers, {self.isa}",
            f"context {self.config.num_ctx}",
        ]
        if lossy := self.read_report.lossy:
            worst = max(lossy, key=lambda name: lossy[name].relative_rms)
            parts.append(
                f"{len(lossy)} tensors requantised, off by up to "
                f"{lossy[worst].relative_rms:.2%} rms ({worst})"
            )
        if not self.read_report.is_direct:
            parts.append("buffered reads (no O_DIRECT here)")
        return "mode: " + " · ".join(parts)

    def mode(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "mode": "dense",
            "workers": self.config.num_workers,
            "npu": {"backend": "native", "threads": self.config.num_npu_threads, "modelled": True},
            "isa": self.isa,
            "num_ctx": self.config.num_ctx,
            "direct_io": self.read_report.is_direct,
            "requantised": {
                name: {"max_abs": error.max_abs, "relative_rms": error.relative_rms}
                for name, error in self.read_report.lossy.items()
            },
            "weight_bytes": sum(place.num_bytes for place in self.layout.weights.values()),
        }

    @property
    def isa(self) -> str:
        """Instruction set of the executors' kernels."""
        return str(self.executors()[0].isa)

    def executors(self) -> list[Any]:
        """An `ExecutorStatus` of each executor."""
        return self._launch.executor_statuses(self.actors)

    def memory(self) -> MemoryReport:
        """What everything together takes now, measured."""
        report = self.cluster.memory_report()
        own = ("driver", "ray::")
        ray_bytes = sum(p.pss_bytes for p in report if not p.name.startswith(own))
        return MemoryReport(sum(p.pss_bytes for p in report), ray_bytes, self.layout.num_bytes)

    def close(self) -> None:
        """Stop everything; nothing of this engine is left."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
