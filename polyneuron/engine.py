"""The public facade: open a model, generate, close.

with Engine("smollm2") as engine:
    print(engine.generate("The capital of France is", max_tokens=16).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polyneuron.actors.cluster import ClusterConfig, PrivateCluster
from polyneuron.actors.messages import RequestOutcome, SubmitRequest
from polyneuron.actors.sequence_run import Mailbox
from polyneuron.candidate import Candidate, OpenRequest
from polyneuron.completion import Completion
from polyneuron.config import EngineConfig, check_whole
from polyneuron.core_use import place_here
from polyneuron.errors import ConfigError, ContextError, EngineError
from polyneuron.generation import Generation, make_stops
from polyneuron.host_memory import HostMemory
from polyneuron.io.ncf_format import Layout
from polyneuron.io.weight_reader import ReadReport
from polyneuron.io_report import LayerActivity, layer_activity
from polyneuron.mode import Mode
from polyneuron.model.chat_template import ChatTemplate
from polyneuron.model.locate import locate_model
from polyneuron.model.model_cache import cached_ncf
from polyneuron.model.sampling import SamplingParams
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.planning.budget import Budget, fit, fit_runnable, private_estimate, resolve_config
from polyneuron.planning.layout import ArenaLayout
from polyneuron.planning.source import ModelSource, open_source
from polyneuron.recording import recorded, tell_run, with_trace_path

if TYPE_CHECKING:
    from polyneuron.actors.launch import Actors

LOAD_SLICE_S = 0.1
Prompt = str | Sequence[int]
LoadProgress = Callable[[int, int], None]
"""Called with bytes read so far and bytes to read."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory in use, in bytes; shared pages counted once (PSS)."""

    total_bytes: int
    peak_bytes: int
    """The most since the engine was opened: of the cgroup where one limits, else as seen."""
    ray_bytes: int
    arena_bytes: int


class Engine:
    """One open model on its own private Ray cluster; one at a time in a process."""

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        on_load: LoadProgress | None = None,
        on_convert: LoadProgress | None = None,
        first_prompt: Prompt | None = None,
        **settings: Any,
    ) -> None:
        started = time.monotonic()
        self.source: ModelSource = open_source(locate_model(model))
        self.spec = self.source.spec
        name = self.source.path.name
        self.tokenizer = Tokenizer.from_metadata(self.source.metadata, name)
        base = config or EngineConfig()
        try:
            base = replace(base, **settings)
        except TypeError as error:
            raise ConfigError(f"Engine: {error}") from None
        self.config = resolve_config(with_trace_path(base), self.spec)
        # Asked once: what Ray takes later is counted apart.
        self._limit_bytes = self.config.memory_bytes or HostMemory().default_budget()
        self.source, self.budget = self._plan_runnable(on_convert)
        if first_prompt is not None:  # what does not fit is refused before weights are read
            self.encode_prompt(first_prompt)
        self._lock = threading.Lock()
        self._next_id = 1
        self._mailboxes = list(range(self.config.max_requests - 1, -1, -1))
        self._is_closed = False
        self._seen_peak = 0
        self._actors: Actors | None = None
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as cleanup:
            self._start(cleanup, on_load)
            self._cleanup = cleanup.pop_all()
        self.load_ms = (time.monotonic() - started) * 1e3

    def _plan(self, private_bytes: int) -> Budget:
        """Fit the model into what the user allows, or the machine leaves."""
        return fit(self.source, self.config, self._limit_bytes, private_bytes)

    def _plan_runnable(self, on_convert: LoadProgress | None) -> tuple[ModelSource, Budget]:
        """The budget by estimate; a GGUF that does not fit is converted once into the cache."""
        path, progress = self.source.path, on_convert or (lambda _done, _total: None)

        def become(layout: Layout) -> ModelSource:
            return open_source(cached_ncf(path, progress, layout=layout))

        private = private_estimate(self.config)
        return fit_runnable(self.source, self.config, self._limit_bytes, private, become)

    @property
    def layout(self) -> ArenaLayout:
        """Where everything lies in the arena."""
        return self.budget.layout

    def _start(self, cleanup: contextlib.ExitStack, on_load: LoadProgress | None) -> None:
        # Imported late: importing Ray takes half a second and reads the environment.
        from polyneuron.actors.arena import object_bytes

        self.timeline = cleanup.enter_context(recorded(self.config))
        cluster_config = ClusterConfig(object_bytes(self.layout))
        self.cluster = cleanup.enter_context(PrivateCluster(cluster_config))
        from polyneuron.actors import launch

        self._launch = launch
        # The arena stays mapped as long as they are held.
        cleanup.callback(setattr, self, "_actors", None)
        self._cores = place_here(self.config, reads=self.layout.is_streaming)
        staff = launch.hire(self.source.path, self._cores, self.config)
        measured = sum(process.pss_bytes for process in self.cluster.memory_report())
        self.budget = self._plan(private_estimate(self.config, measured))
        if self.budget.layout.is_streaming and not self.source.can_stream:
            raise ConfigError(
                f"{self.source.path}: Ray and Python take {measured >> 20} MiB here, more than "
                f"expected, and the model no longer fits: give it {measured >> 20} MiB more"
            )
        self._actors = launch.launch(staff, self.spec, self.layout)
        cleanup.callback(self._actors.stop)
        tell_run(self)
        self.read_report = self._load(on_load)

    @property
    def actors(self) -> Actors:
        """The actors of this engine; raises EngineError when it is closed."""
        self.check_open()
        assert self._actors is not None
        return self._actors

    def check_open(self) -> None:
        """Raise EngineError when the engine is closed: Ray would start a cluster of its own."""
        if self._is_closed:
            raise EngineError("this engine is closed: open another one")

    def _load(self, on_load: LoadProgress | None) -> ReadReport:
        reads = self.source.reads(self.layout)
        total = sum(read.file_bytes for read in reads)
        counter = self.actors.arena.view(self.layout.at("inputs.bytes_read"), (1,), "u8")
        ref = self._launch.load(self.actors, reads)
        while (report := self._launch.take_report(ref, LOAD_SLICE_S)) is None:
            self._launch.check_processes(self.actors)
            if on_load:
                on_load(int(counter[0]), total)
        if on_load:
            on_load(total, total)
        return report

    # ---- requests

    def tokenize(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of raw text; control tokens in it count as such."""
        return self.tokenizer.encode(text, add_bos=add_bos, parse_special=True)

    def submit(self, *candidates: Mapping[str, Any]) -> list[OpenRequest]:
        """Start one request, or several with the same prompt, by fields of `SubmitRequest`."""
        actors, count = self.actors, len(candidates)
        self._launch.check_running(actors)
        with self._lock:
            if len(self._mailboxes) < count:
                raise EngineError(
                    f"{self.config.max_requests} requests are running or waiting: try again later"
                )
            indexes = [self._mailboxes.pop() for _ in range(count)]
            first_id, self._next_id = self._next_id, self._next_id + count
        mailboxes = [Mailbox(actors.arena, self.layout, index) for index in indexes]
        requests = [
            SubmitRequest(request_id=first_id + i, mailbox=index, **candidates[i])
            for i, index in enumerate(indexes)
        ]
        try:
            for mailbox in mailboxes:
                mailbox.clear()
            self._launch.ask_coordinator(actors, "submit", [r.pack() for r in requests])
        except BaseException:
            self._free_mailboxes(indexes)
            raise
        return [OpenRequest(self, r, m) for r, m in zip(requests, mailboxes, strict=True)]

    def _free_mailboxes(self, indexes: Iterable[int]) -> None:
        with self._lock:
            self._mailboxes.extend(indexes)

    def _checked(self, tokens: Iterable[int]) -> list[int]:
        """Token ids as plain integers of the vocabulary; at least one."""
        try:
            prompt = [operator.index(token) for token in tokens]
        except TypeError:
            raise ConfigError("a prompt is text or a sequence of token ids") from None
        if not prompt:
            raise ConfigError("the prompt is empty: give at least one token")
        bad = [token for token in prompt if not 0 <= token < self.spec.vocab_size]
        if bad:
            raise ConfigError(
                f"prompt token {bad[0]} is not in the vocabulary of {self.spec.vocab_size}"
            )
        return prompt

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens that fit behind the prompt; at least 1, or ContextError with both numbers."""
        room = self.config.num_ctx - len(prompt)
        if room < 1:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens, the context {self.config.num_ctx}: shorten "
                f"it, or enlarge the context with -c (the model allows {self.spec.context_length})"
            )
        return room

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt this engine can take; else an error with both numbers."""
        tokens = self._checked(self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        self._room(tokens)
        return tokens

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = -1,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        top_logprobs: int = 0,
        ignore_eos: bool = False,
        best_of: int = 1,
    ) -> Generation:
        """Start a request; `max_tokens` -1: until the model ends or the context is full.

        `best_of` N draws N answers to the prompt, which is computed once, and gives the one whose
        tokens have the best mean log-probability; the i-th (from 0) is drawn with seed + i.
        """
        self.check_open()
        tokens = self.encode_prompt(prompt)
        room = self._room(tokens)
        check_whole("max_tokens", max_tokens, -1, None)
        check_whole("top_logprobs", top_logprobs, 0, self.spec.vocab_size)
        self._check_best_of(best_of)
        stops = [make_stops(stop) for _ in range(best_of)]
        fields = {
            "prompt": tokens,
            "max_tokens": min(max_tokens, room) if max_tokens >= 0 else room,
            "end_ids": [] if ignore_eos else sorted(self.tokenizer.end_ids),
            "top_logprobs": top_logprobs,
            "hash_logits": self.config.deterministic,
            "score_answer": best_of > 1,
        }
        drawn = (sampling or SamplingParams()).for_candidates(best_of)
        requests = self.submit(*({**fields, "sampling": asdict(params)} for params in drawn))
        return Generation(
            self, [Candidate(self, *pair) for pair in zip(requests, stops, strict=True)]
        )

    def _check_best_of(self, best_of: int) -> None:
        check_whole("best_of", best_of, 1, None)
        for name in ("max_sequences", "max_requests"):
            if best_of > (most := getattr(self.config, name)):
                raise ConfigError(
                    f"best_of is {best_of}: this engine's {name} is {most}; open it with "
                    f"{name}={best_of}"
                )

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Run one request to its end; options as for `stream`."""
        return self.stream(prompt, **options).wait()

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a conversation by the model's own template; options as for `stream`."""
        return self.stream(self.encode_chat(messages), **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        template = ChatTemplate.from_metadata(self.source.metadata, self.source.path.name)
        return template.encode_chat(self.tokenizer, messages)

    def score(self, tokens: Iterable[int], first: int) -> list[float]:
        """Log-probabilities of tokens first+1, first+2, … given all before each."""
        self.check_open()
        prompt = self._checked(tokens)
        if len(prompt) > self.config.num_ctx:
            raise ContextError(
                f"{len(prompt)} tokens to score, the context has {self.config.num_ctx}"
            )
        check_whole("first", first, 0, len(prompt) - 1)
        (request,) = self.submit({"prompt": prompt, "max_tokens": 0, "score_from": first})
        try:
            request.wait_finished()
            return request.take_outcome().scores
        finally:
            request.abandon()

    async def agenerate(self, prompt: Prompt, **options: Any) -> Completion:
        """`generate` for asyncio; cancelling the task cancels the request."""
        generation = await asyncio.to_thread(self.stream, prompt, **options)
        return await generation.await_completion()

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """`stream` for asyncio: pieces of text; leaving early cancels the request."""
        generation = await asyncio.to_thread(self.stream, prompt, **options)
        async for piece in generation:
            yield piece

    # ---- used by Generation

    def cancel(self, request_ids: list[int]) -> None:
        """End requests soon; an ended one is no error."""
        self._launch.ask_coordinator(self.actors, "cancel", request_ids)

    def check_alive(self) -> None:
        """Raise EngineError when the coordinator's loop has ended or its process is lost."""
        self._launch.check_running(self.actors)

    def take_outcome(self, request: SubmitRequest) -> RequestOutcome:
        """The outcome of an ended request; frees its mailbox in any case."""
        try:
            ask = self._launch.ask_coordinator
            outcome = RequestOutcome.unpack(ask(self.actors, "take_outcome", request.request_id))
        finally:
            self._free_mailboxes([request.mailbox])
        if outcome.error is not None:
            raise EngineError(outcome.error)
        return outcome

    def change_memory(self, memory_bytes: int) -> None:
        """Take less memory, or as much as at first again, between two steps; no request is lost.

        The neuron cache shrinks or grows. ConfigError names the least, or that there is no cache.
        """
        num_slots = self.budget.slots_within(memory_bytes)
        self._launch.ask_coordinator(self.actors, "resize_cache", num_slots, memory_bytes)

    # ---- reports

    def mode(self) -> Mode:
        """How this engine runs: `line()` before the first token, `as_dict()` as data."""
        return Mode(self.source, self.config, self.budget, self.read_report, self.isa, self._cores)

    def activity(self) -> list[LayerActivity]:
        """How many neurons of each layer the tokens so far activated; empty of tiles."""
        return layer_activity(self.actors.arena, self.layout)

    @property
    def isa(self) -> str:
        """Instruction set of the executors' kernels."""
        return str(self.executors()[0].isa)

    def executors(self) -> list[Any]:
        """An `ExecutorStatus` of each executor."""
        return self._launch.executor_statuses(self.actors)

    def memory(self) -> MemoryReport:
        """What everything together takes now, measured."""
        self.check_open()
        report = self.cluster.memory_report()
        own = ("driver", "ray::")
        ray_bytes = sum(p.pss_bytes for p in report if not p.name.startswith(own))
        total = sum(p.pss_bytes for p in report)
        self._seen_peak = max(self._seen_peak, total)
        peak = HostMemory().peak() or self._seen_peak
        return MemoryReport(total, peak, ray_bytes, self.layout.num_bytes)

    def close(self) -> None:
        """Stop everything; nothing of this engine is left. Safe to call again."""
        self._is_closed = True
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
