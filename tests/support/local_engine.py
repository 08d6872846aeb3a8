"""A whole model in one process: threads as executors over a local arena, without Ray.

Coordinator state, step runner, sampling, mailboxes and the C interpreter are the product's own.
"""

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.actors.arena import LocalArena, format_arena
from polyneuron.actors.coordinator import StepPlan
from polyneuron.actors.messages import SubmitRequest
from polyneuron.actors.request_book import RequestBook
from polyneuron.actors.sequence_run import SequenceRun
from polyneuron.actors.step_runner import StepRunner
from polyneuron.actors.step_trace import StepTrace, make_trace
from polyneuron.backends.backend import Backend
from polyneuron.backends.choice import open_backend
from polyneuron.backends.notice import read_notice
from polyneuron.backends.op_server import open_server
from polyneuron.backends.spec import parse_npu
from polyneuron.config import EngineConfig, Phase
from polyneuron.errors import EngineError
from polyneuron.io.arena_loader import read_all
from polyneuron.io.block_device import BlockDevice
from polyneuron.io.file_device import open_device
from polyneuron.io.layer_reader import LayerReader
from polyneuron.io.neuron_reader import NeuronReader, open_neuron_device
from polyneuron.io_report import LayerActivity, layer_activity
from polyneuron.kernels import isa
from polyneuron.kernels.arena import Arena, ServeStatus, Unit
from polyneuron.kernels.backend_calls import BackendCalls
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.model.convert import convert
from polyneuron.model.sampling import SamplingParams
from polyneuron.planning.budget import fit
from polyneuron.planning.layout import ArenaLayout, num_executors
from polyneuron.planning.source import ModelSource, open_source

SERVE_SLICE_NS = 1_000_000_000
JOIN_TIMEOUT_S = 10.0
AMPLE_BYTES = 8 << 30
GREEDY = SamplingParams(temperature=0.0)
SMALL = EngineConfig(num_ctx=256, num_workers=2, num_npu_threads=2, max_sequences=1)


@dataclass(slots=True)
class LocalResult:
    """What one request gave."""

    tokens: list[int]
    finish_reason: str
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    """Of every generated token, in order, each (vocab_size,)."""
    scores: list[float] = field(default_factory=list)
    batch_sizes: list[tuple[int, int]] = field(default_factory=list)


class LocalEngine:
    """An open model; `settings` are fields of EngineConfig, small by default."""

    def __init__(
        self,
        path: Path | str,
        *,
        isa_name: str | None = None,
        wrap: Callable[[BlockDevice], BlockDevice] = lambda device: device,
        backend: Backend | None = None,
        **settings: Any,
    ) -> None:
        self._backend = backend
        """Of the NPU executor, in the place of the one that `npu` names."""
        self._wrap = wrap
        """Around the device layers are streamed from."""
        self.isa = isa.select(isa_name)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.source = self._runnable(Path(path))
        self.spec = self.source.spec
        self.config = replace(SMALL, **settings)
        self.budget = fit(self.source, self.config, AMPLE_BYTES, 0)
        self.layout = self.budget.layout
        self.plans: list[StepPlan] = []
        """Every step performed so far."""
        self.graphs: list[str] = []
        """The step program of each of them."""
        self.step_ns: list[int] = []
        """The time of each of them."""
        self.dry = False
        """Whether steps skip their kernels."""
        self._local = LocalArena(self.layout)
        self.arena = self._local.arena
        format_arena(self.arena, self.layout, num_executors(self.config))
        self._read_weights()
        self._trace = make_trace(self.arena, self.layout)
        self._runner = StepRunner(self.arena, self.spec, self.layout, self._trace)
        self._next_id = 1
        self._calls = self._open_server()
        units = [Unit.CPU] * self.config.num_workers + [Unit.NPU] * self.config.num_npu_threads
        # Attached here, not in the threads: an executor takes part in steps rung after that.
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(index, self.arena.attach(index, unit, os.getpid())),
                daemon=True,
            )
            for index, unit in enumerate(units)
        ]
        if self.layout.is_streaming:
            self._threads.append(threading.Thread(target=self._stream, daemon=True))
        if self.layout.has_neuron_cache:
            self._threads.append(threading.Thread(target=self._read_neurons, daemon=True))
        for thread in self._threads:
            thread.start()

    def _open_server(self) -> BackendCalls | None:
        spec = parse_npu(self.config.npu)
        backend = self._backend or (open_backend(spec, 1) if spec.has_graphs else None)
        first = self.config.num_workers
        waits = self.config.deterministic
        self.server = open_server(self.arena, first, backend, waits=waits)
        return BackendCalls(self.server) if self.server else None

    def notice(self) -> str:
        """Why the back end gave up; empty: it did not."""
        return read_notice(self.arena, self.layout.at("inputs.npu_notice"))

    def _runnable(self, path: Path) -> ModelSource:
        """The model; a GGUF that only runs in bundles is converted, as a run does."""
        source = open_source(path)
        if source.header is None or not source.is_in_bundles_only:
            return source
        self._folder = tempfile.TemporaryDirectory(prefix="polyneuron-test-")
        converted = Path(self._folder.name) / "model.ncf"
        convert(path, converted)
        return open_source(converted)

    def _read_weights(self) -> None:
        reads, path = self.source.reads(self.layout), self.source.path
        self.read_report = read_all(path, reads, self.arena, lambda _: None)

    def _stream(self) -> None:
        """Fill the stage buffers until the stream stops."""
        schedules = [self.layout.loads(phase) for phase in (Phase.PREFILL, Phase.DECODE)]
        offset = self.layout.at("boards.stream")
        trace = self.layout.at("trace.stream") if self.config.trace else 0
        with open_device(self.source.path) as device:
            experts = self.layout.expert_pieces
            reader = LayerReader(self._wrap(device), self.arena, offset, schedules, trace, experts)
            reader.run()

    def _read_neurons(self) -> None:
        """Perform the reads executors order until the ring stops."""
        offset = self.layout.at("boards.reads")
        with open_neuron_device(self.source.path, self.arena, offset) as device:
            NeuronReader(self._wrap(device), self.arena, offset).run()

    def _serve(self, executor: int, generation: int) -> None:
        backend = self._calls if executor == self.config.num_workers else None
        serve = self.arena.serve
        while serve(executor, generation, SERVE_SLICE_NS, backend) is ServeStatus.SLICE:
            pass

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> LocalResult:
        """Run one request to its end; `fields` are those of SubmitRequest."""
        return self.run_all([self.request(prompt, max_tokens, sampling=sampling, **fields)])[0]

    def score(self, tokens: Sequence[int], first: int) -> list[float]:
        """As `Engine.score`."""
        return self.generate(tokens, 0, score_from=first).scores

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> SubmitRequest:
        """A request for `run_all`."""
        number, self._next_id = self._next_id, self._next_id + 1
        mailbox = number % self.config.max_requests
        return SubmitRequest(
            number, mailbox, list(prompt), max_tokens, sampling=asdict(sampling), **fields
        )

    def run_all(self, requests: Sequence[SubmitRequest]) -> list[LocalResult]:
        """Run requests together, as many at once as the configuration allows."""
        return self.run_arriving([(0, [request]) for request in requests])

    def candidates(
        self,
        prompt: Sequence[int],
        limits: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> list[SubmitRequest]:
        """Requests for `run_arriving`: answers to one prompt, of at most so many tokens each."""
        drawn = zip(limits, sampling.for_candidates(len(limits)), strict=True)
        return [self.request(prompt, limit, sampling=one, **fields) for limit, one in drawn]

    def run_arriving(
        self,
        groups: Sequence[tuple[int, Sequence[SubmitRequest]]],
        cancels: Sequence[tuple[int, SubmitRequest]] = (),
    ) -> list[LocalResult]:
        """Run groups of candidates, each submitted before the step of that number; in order.

        Requests in `cancels` are ended before the step of their number.
        """
        book = RecordingBook(self.arena, self.layout, self._runner, self._trace)
        due = list(groups)
        for step in itertools.count():
            for group in [group for when, group in due if when <= step]:
                book.submit(group)
            due = [(when, group) for when, group in due if when > step]
            for when, request in cancels:
                if when == step:
                    book.cancel(request.request_id)
            plan = book.next_plan()
            if plan is not None:
                logits = self._perform(plan)
                book.step_done(plan, logits, self.step_ns[-1])
                self._trace.step_done(plan, self.step_ns[-1], None)
            elif not due:
                break
        return [book.result(request.request_id) for _, group in groups for request in group]

    def _perform(self, plan: StepPlan) -> NDArray[np.float32]:
        logits, step_ns = self._runner.run(plan, self._check_threads, dry=self.dry)
        self.plans.append(plan)
        self.graphs.append(self._runner.graph(plan))
        self.step_ns.append(step_ns)
        return logits

    def _check_threads(self) -> bool:
        ended = [index for index, thread in enumerate(self._threads) if not thread.is_alive()]
        if ended:
            raise EngineError(f"executor threads {ended} have ended inside a step")
        return False

    def cache(self) -> NeuronCache:
        """The neuron cache in the arena."""
        return NeuronCache(self.arena.address + self.layout.at("boards.cache"))

    def activity(self) -> list[LayerActivity]:
        """As `Engine.activity`."""
        return layer_activity(self.arena, self.layout)

    def close(self) -> None:
        """Let every executor leave and give the arena back."""
        if self.layout.is_streaming:
            self.arena.stop_stream(self.layout.at("boards.stream"))
        if self.layout.has_neuron_cache:
            self.arena.stop_neuron_reads(self.layout.at("boards.reads"))
        self.arena.stop()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive()
        if self.server:
            self.server.close()
        self._trace.close()
        self._local.close()
        if self._folder:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RecordingBook(RequestBook):
    """Keeps the logits each request was given."""

    def __init__(
        self, arena: Arena, layout: ArenaLayout, runner: StepRunner, trace: StepTrace
    ) -> None:
        super().__init__(arena, layout, runner, trace)
        self._logits: dict[int, list[NDArray[np.float32]]] = {}
        self._tokens: dict[int, list[int]] = {}

    def submit(self, requests: Sequence[SubmitRequest]) -> None:
        """As the product's."""
        super().submit(requests)
        for request in requests:
            self._logits[request.request_id] = []
            self._tokens[request.request_id] = self.runs[request.request_id].sequence.tokens

    def take_logits(
        self,
        run: SequenceRun,
        logits: NDArray[np.float32],
        position: int,
        step_ns: int,
        batch_size: int,
    ) -> None:
        """As the product's, with a copy of what tokens are sampled from."""
        request = run.sequence.request
        if request.max_tokens:
            self._logits[request.request_id].append(logits.copy())
        super().take_logits(run, logits, position, step_ns, batch_size)

    def result(self, request_id: int) -> LocalResult:
        """What an ended request gave."""
        outcome = self.take_outcome(request_id)
        if outcome.error is not None:
            raise EngineError(outcome.error)
        return LocalResult(
            self._tokens[request_id],
            outcome.finish_reason,
            self._logits[request_id],
            outcome.scores,
            outcome.batch_sizes,
        )
