"""A scenario in model time: the real coordinator's state and neuron cache, costs instead of work.

One thread, one virtual clock. The coordinator decides what each step computes, the simulated engine
how long it takes; events of the script act between steps.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from polyneuron.actors.coordinator import (
    KV_BLOCK_TOKENS,
    CoordinatorState,
    RequestStatus,
    Sequence,
    StepPlan,
)
from polyneuron.actors.messages import SubmitRequest
from polyneuron.clock import VirtualClock
from polyneuron.config import EngineConfig, Phase, cache_folder
from polyneuron.errors import ConfigError
from polyneuron.host_memory import HostMemory
from polyneuron.measure.device_store import load_profile
from polyneuron.measure.disk_probe import nearest_folder
from polyneuron.scenarios.checkers import Checker
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.disturbance import Deed, Disturbance
from polyneuron.scenarios.file_shape import modelled
from polyneuron.scenarios.included import HERE
from polyneuron.scenarios.measured import Asked, Measured
from polyneuron.scenarios.pressure import Pressure, is_due
from polyneuron.scenarios.recording import with_recording
from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.script import Script
from polyneuron.scenarios.simulated_engine import SimulatedEngine, StepOutcome
from polyneuron.scenarios.step_timeline import StepTimeline
from polyneuron.scenarios.timeline_sink import TimelineSink
from polyneuron.scenarios.workload import Request

TOKEN = 1
"""Which tokens there are plays no part in what a step takes."""
DETECT_NS = 250_000_000
"""The coordinator asks the supervisor this often while a step is late."""
RESTART_NS = 1_600_000_000
"""From a lost process to its replacement's first answer (docs/DESIGN.md)."""
READ_TRIES = 3


def simulate(script: Script, timeline: TimelineSink | None) -> Figures:
    """Play a scenario in model time and return its figures; events go to the timeline."""
    return SimulatedRun(script, timeline).play()


def device_of(script: Script) -> DeviceModel:
    """The device that a scenario names; this machine must have been measured before."""
    where = script.where("device")
    if script.device.get("profile") != HERE:
        return DeviceModel.from_table(script.device, where)
    profile = load_profile(nearest_folder(cache_folder()))
    if profile is None:
        raise ConfigError(
            f"{where}.profile: this machine has not been measured; say polyneuron profile --device"
        )
    return DeviceModel.of_profile(profile, HostMemory().default_budget())


class SimulatedRun:
    """One run of a script."""

    def __init__(
        self,
        script: Script,
        timeline: TimelineSink | None,
        device: DeviceModel | None = None,
        checker: Checker | None = None,
    ) -> None:
        self.script = script
        self._checker = checker
        device = device or device_of(script)
        shape, own = modelled(script, device)
        shape = with_recording(script, shape, own)
        candidates = max(request.best_of for request in script.requests)
        most = max(script.engine.max_sequences if len(script.requests) > 1 else 1, candidates)
        self.settings = replace(script.engine, max_sequences=most)
        self.engine = SimulatedEngine(
            self.settings, device, shape, script.seed, script.where("engine"),
            *_most_memory(script.events), own,
        )  # fmt: skip
        config = EngineConfig(
            num_ctx=self.settings.num_ctx, max_sequences=most,
            max_tokens=max(most, self.settings.max_tokens),
            max_logit_rows=max(8, most),
        )  # fmt: skip
        blocks = -(-self.settings.num_ctx // KV_BLOCK_TOKENS) * most
        self.state = CoordinatorState(config, blocks)
        self.clock = VirtualClock()
        self.measured = Measured(peak_bytes=self.engine.plan.used_bytes)
        self.timeline = StepTimeline(timeline, self.engine)
        self.pressure = Pressure(script.events)
        self._arriving = list(script.requests)
        self._arrived: dict[int, int] = {}
        self._last_token: dict[int, int] = {}
        self._next_id = 0
        self._asked: dict[int, Asked] = {}
        self._faulty_reads = 0
        self._is_broken = False
        self._extra_ns = 0

    # ---- the run

    def play(self) -> Figures:
        """Until every request that arrives has ended."""
        self.timeline.run(self.script)
        while self._next_step():
            pass
        self.timeline.phase(self.clock.now_ns(), Phase.IDLE)
        rounds = self.engine.recording_rounds
        return self.measured.figures() | ({} if rounds is None else {"recording_rounds": rounds})

    def _next_step(self) -> bool:
        self._arrive()
        self._disturb()
        for sequence in self.state.admit():
            self.engine.begin(sequence.slot, len(sequence.request.prompt))
            self.timeline.admitted(self.clock.now_ns(), sequence)
        plan = self.state.schedule()
        if plan is not None:
            self._perform(plan)
            return True
        return self._wait_for_arrival()

    def _wait_for_arrival(self) -> bool:
        """Nothing runs: time passes until somebody comes; False when nobody will.

        Who waits for tokens that will never be, since requests have failed, comes now.
        """
        if not self._arriving:
            return False
        times = [r.moment.at_ns for r in self._arriving if r.moment.at_ns is not None]
        if not times:
            self._submit(self._arriving.pop(0), self.clock.now_ns())
            return True
        self.clock.wait_ns(min(times) - self.clock.now_ns())
        return True

    def _arrive(self) -> None:
        now, tokens = self.clock.now_ns(), self.measured.tokens
        for request in [r for r in self._arriving if is_due(r.moment, now, tokens)]:
            self._arriving.remove(request)
            at_ns = now if request.moment.at_ns is None else request.moment.at_ns
            self._submit(request, at_ns)

    def _submit(self, request: Request, at_ns: int) -> None:
        limits = request.candidate_tokens()
        if request.prompt_tokens + max(limits) > self.settings.num_ctx:
            raise ConfigError(
                f"{self.script.where('engine')}.context is {self.settings.num_ctx}: a request of "
                f"{request.prompt_tokens} and {max(limits)} tokens does not fit; give a longer one"
            )
        prompt = [TOKEN] * request.prompt_tokens
        asked = Asked(len(limits))
        submits = [
            SubmitRequest(self._next_id + i, 0, prompt, limit) for i, limit in enumerate(limits)
        ]
        self._asked |= dict.fromkeys(range(self._next_id, self._next_id + len(limits)), asked)
        self._next_id += len(limits)
        for sequence in self.state.submit_candidates(submits):
            self._arrived[sequence.request.request_id] = at_ns
            self.timeline.queued(at_ns, sequence)

    # ---- steps

    def _perform(self, plan: StepPlan) -> None:
        if plan.batch_change is not None:
            self._extra_ns += self._change_batch(plan.batch_size)
        outcome = self._outcome(plan)
        begin = self.clock.now_ns()
        self.timeline.step(begin, self.state.num_steps, plan, outcome)
        self.clock.wait_ns(outcome.ns)
        if self._is_broken and outcome.totals.reads:
            self._fail(plan)
            return
        if plan.phase is Phase.DECODE:
            self.measured.decode(outcome, plan.batch_size)
        else:
            self.measured.prefill(outcome, len(plan.rows))
        self._give_tokens(plan, self.state.computed(plan))

    def _change_batch(self, batch: int) -> int:
        loading = self.engine.set_batch(batch)
        self.timeline.batch(self.clock.now_ns(), batch)
        return loading

    def _outcome(self, plan: StepPlan) -> StepOutcome:
        if plan.phase is Phase.PREFILL:
            outcome = self.engine.prefill(len(plan.rows))
        else:
            slots = [row.sequence.slot for row in plan.rows]
            kv_tokens = sum(row.position + 1 for row in plan.rows)
            is_detailed = self._checker is not None or self.timeline.wants_detail()
            outcome = self.engine.decode(slots, kv_tokens, is_detailed)
            if self._checker is not None:
                self._checker.step_done(self.engine, outcome)
        extra, self._extra_ns = self._extra_ns, 0
        if outcome.totals.reads:
            extra += self._retries()
        return replace(outcome, ns=outcome.ns + extra) if extra else outcome

    def _retries(self) -> int:
        """What failing reads add to a step: they are tried again, short ones gone on with."""
        failing, self._faulty_reads = self._faulty_reads, 0
        if self._is_broken:
            failing = READ_TRIES
        costs = self.engine.costs()
        alone = costs.latency_ns / costs.now.flash + costs.read_ps(costs.reads[0]) / 1e3
        return round(failing * alone)

    def _give_tokens(self, plan: StepPlan, joined: SequenceOf[Sequence]) -> None:
        for index in plan.logit_rows:
            for sequence in (plan.rows[index].sequence, *joined):
                self._give_token(sequence)

    def _give_token(self, sequence: Sequence) -> None:
        now, request = self.clock.now_ns(), sequence.request.request_id
        self.state.append(sequence, TOKEN)
        self.measured.tokens += 1
        if request in self._last_token:
            self.measured.token_ns.append(now - self._last_token[request])
        else:
            self.measured.first_token_ns.append(now - self._arrived[request])
        self._last_token[request] = now
        self.timeline.token(now, sequence)
        if sequence.status is RequestStatus.FINISHED:
            self.measured.ended(self._asked[request], failed=False)
            self.timeline.finished(now, sequence)

    def _fail(self, plan: StepPlan) -> None:
        """A read has failed for good: who needed it ends, the engine goes on."""
        now = self.clock.now_ns()
        self.timeline.fault(now, "io", "read_error", "device")
        self.state.num_steps += 1
        for sequence in {row.sequence.slot: row.sequence for row in plan.rows}.values():
            for one in [sequence, *self.state.followers(sequence)]:
                self.state.finish(one, "error")
                self.measured.ended(self._asked[one.request.request_id], failed=True)
                self.timeline.finished(now, one)

    # ---- events

    def _disturb(self) -> None:
        now, tokens = self.clock.now_ns(), self.measured.tokens
        for event in self.pressure.due(now, tokens):
            self._act(event, now)
        before = self.engine.conditions
        self.engine.set_conditions(self.pressure.conditions(before, now, tokens))

    def _act(self, event: Disturbance, now: int) -> None:
        match event.deed:
            case Deed.SHRINK_MEMORY | Deed.GROW_MEMORY:
                plan = self.engine.change_memory(event.memory_bytes, event.ffn_resident)
                self.measured.peak_bytes = max(self.measured.peak_bytes, plan.used_bytes)
                self.timeline.resized(now, plan)
            case Deed.FAIL_READ:
                self._is_broken = self._is_broken or event.persistent
                self._faulty_reads += event.count
            case Deed.STALL_NPU:
                self._extra_ns += event.stall_ns
            case Deed.LOSE_WORKER | Deed.LOSE_NPU | Deed.LOSE_READER:
                self._lose(event, now)
            case Deed.SHIFT_HOT_SET:
                self.engine.shift_hot_set(event.share)
        self.timeline.disturbed(now, event)

    def _lose(self, event: Disturbance, now: int) -> None:
        """A process is lost in the step that runs: noticed, replaced, and the step done again."""
        self._extra_ns += DETECT_NS + RESTART_NS
        self.measured.restarts += 1
        self.timeline.restart(now + DETECT_NS, event, self.measured.restarts, RESTART_NS)


def _most_memory(events: SequenceOf[Disturbance]) -> tuple[int, float | None]:
    """The largest budget and share that events give."""
    shares = [event.ffn_resident for event in events if event.ffn_resident is not None]
    return max([0, *(event.memory_bytes for event in events)]), max(shares, default=None)
