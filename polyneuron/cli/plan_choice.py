"""What `plan` adds where the machine has been measured: the speed to expect, and the best plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyneuron.cli.profile_device import say
from polyneuron.config import EngineConfig
from polyneuron.cores import this_machine
from polyneuron.errors import ConfigError
from polyneuron.io.piece_writer import check_output
from polyneuron.io.whole_file import write_whole
from polyneuron.measure.device_store import load_profile, measure_and_store
from polyneuron.planning.budget import Budget
from polyneuron.planning.cost_model import Knobs, StepCost
from polyneuron.planning.known_model import known_model
from polyneuron.planning.plan_file import plan_file, plan_text, read_plan
from polyneuron.planning.planner import Plan, Planner
from polyneuron.planning.source import ModelSource

HINT = "polyneuron profile --device measures this machine; then plan tells tokens a second"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a run with these flags gives, and the best plan; None where nothing was measured."""

    config: EngineConfig
    as_asked: StepCost | None
    plan: Plan | None
    has_weaker_cores: bool = False
    """Whether `-C` names weaker cores than those whose speed was measured."""

    def lines(self) -> list[str]:
        """For people."""
        if self.plan is None or self.as_asked is None:
            return [HINT]
        best, knobs = self.plan.chosen.cost, self.plan.chosen.knobs
        lines = [f"expected: {speed(self.as_asked)}"]
        if best.tokens_per_s > 1.02 * self.as_asked.tokens_per_s:
            lines.append(f"plan: {self.plan.reason()} ({shown(knobs)}); write it with -o FILE, "
                         f"use it with run --plan FILE")  # fmt: skip
        else:
            lines.append(f"plan: {self.plan.reason()}")
        if not self.plan.is_measured and best.hit_rate is not None:
            lines.append("how often neurons are active is supposed: polyneuron profile counts it")
        if self.has_weaker_cores:
            lines.append("speeds are those of the strongest cores; the ones named are slower")
        return lines


def choose(
    source: ModelSource,
    config: EngineConfig,
    budget: Budget,
    core_counts: tuple[int, ...] = (),
    *,
    must_measure: bool,
) -> Chosen:
    """The best plan by the machine's profile, which is measured now if it must be.

    `core_counts`: numbers of workers at which other kinds of cores join in, to be tried too.
    """
    folder = source.path
    device = load_profile(folder)
    if device is None:
        if not must_measure:
            return Chosen(config, None, None)
        device = measure_and_store(folder, say)
    model = known_model(source, device, config.num_ctx)
    config = replace(config, io_cores=device.reading_order())
    planner = Planner(source, config, budget.limit_bytes, model, core_counts=core_counts)
    hot, ahead = config.hot_for(1), config.lookahead
    asked = planner.choice(budget, hot, config.queue_depth, ahead)
    best, named = this_machine().order, this_machine().chosen(config.cores)
    kind_of = {core: index for index, kind in enumerate(device.core_kinds) for core in kind}
    is_weaker = bool(config.cores) and any(
        kind_of.get(one, 0) > kind_of.get(other, 0) for one, other in zip(named, best, strict=False)
    )
    return Chosen(config, asked.cost, planner.plan(), is_weaker)


def check_plan_output(path: Path) -> None:
    """Raise ConfigError where no plan can be written, before anything is measured."""
    check_output(path)
    if path.exists():
        try:
            read_plan(path)
        except ConfigError:
            raise ConfigError(f"-o {path}: exists and is no plan; give another name") from None


def write_plan(path: Path, chosen: Chosen, source: ModelSource) -> None:
    """Write or replace the plan; `check_plan_output` comes before."""
    assert chosen.plan is not None
    text = plan_text(chosen.plan, plan_file(chosen.plan, source, chosen.config.num_ctx))
    write_whole(path, text.encode())


def speed(cost: StepCost) -> str:
    """A step in words."""
    parts = [f"{cost.tokens_per_s:.1f} tok/s"]
    if cost.bytes_read:
        parts.append(f"{cost.bytes_per_token / 2**20:.1f} MiB read for each token")
    if cost.hit_rate is not None:
        parts.append(f"{cost.hit_rate:.0%} of needed neurons in memory")
    if cost.waiting_share > 0.005:
        parts.append(f"{cost.waiting_share:.0%} of the time waiting for them")
    return ", ".join(parts)


def shown(knobs: Knobs) -> str:
    """What a plan chooses, in words."""
    parts = [f"{knobs.workers} worker{'s' if knobs.workers > 1 else ''}"]
    if knobs.cold_slots:
        parts.append(f"{knobs.queue_depth} reads at once")
    if knobs.hot_neurons:
        parts.append(f"{knobs.hot_neurons} neurons of each layer always in memory")
    if knobs.is_looking_ahead:
        parts.append("reads begin before attention")
    return ", ".join(parts)


def expectations(chosen: Chosen) -> dict[str, Any]:
    """For `--json`; null where nothing was measured."""
    cost, plan = chosen.as_asked, chosen.plan
    return {
        "expected": _figures(cost) if cost else None,
        "plan": {
            "mode": plan.chosen.knobs.mode,
            "workers": plan.chosen.knobs.workers,
            "queue_depth": plan.chosen.knobs.queue_depth,
            "lookahead": plan.chosen.knobs.is_looking_ahead,
            "sparse_prompt_tokens": plan.chosen.budget.layout.config.sparse_prompt_tokens,
            "hot_neurons": {
                str(batch): choice.knobs.hot_neurons for batch, choice in plan.by_batch.items()
            },
            "tokens_per_second": {
                str(batch): choice.cost.tokens_per_s for batch, choice in plan.by_batch.items()
            },
            "expected": _figures(plan.chosen.cost),
            "reason": plan.reason(),
            "is_activity_measured": plan.is_measured,
        }
        if plan
        else None,
    }


def _figures(cost: StepCost) -> dict[str, Any]:
    return {
        "tokens_per_second": cost.tokens_per_s,
        "bytes_per_token": cost.bytes_per_token,
        "reads_per_token": cost.reads / cost.batch,
        "hit_rate": cost.hit_rate,
        "stall_share": cost.waiting_share,
    }
