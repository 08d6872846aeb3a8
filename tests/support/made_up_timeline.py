"""Timelines made up by a seeded generator: the contract's events without an engine."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_DETAILED, DETAIL_EVERY = 64, 16
US, MS = 1_000, 1_000_000


@dataclass
class MadeUp:
    """What a made-up run is like; times are in ns, `faults` adds one of each kind."""

    seed: int = 1
    tokens: int = 3
    prompt: int = 32
    sequences: int = 1
    layers: int = 4
    workers: int = 2
    npus: int = 0
    clusters: int = 4
    reads_a_layer: int = 3
    faults: bool = False
    detail: str = "auto"
    clock: str = "monotonic"
    start_ns: int = 5_000_000_000
    model: str = "made-up-7b"
    lines: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def events(self) -> list[dict[str, Any]]:
        """Every event, ordered and numbered."""
        self.lines.clear()
        self._random, self._now, self._read = random.Random(self.seed), self.start_ns, 0
        self._tell("driver", "run", format=1, clock=self.clock, model=self.model, mode="predicted",
                   isa="avx512_vnni", workers=self.workers, npu_threads=self.npus,
                   layers=self.layers, clusters=self.clusters, memory_bytes=3 << 30,
                   arena_bytes=2 << 30, cold_slots=4096, policy="engine")  # fmt: skip
        if self.tokens:
            self._request()
        self.lines.sort(key=lambda line: line["t_ns"])
        for seq, line in enumerate(self.lines):
            line["seq"] = seq
        return self.lines

    def write(self, path: Path) -> Path:
        """The timeline as a file."""
        text = "".join(json.dumps(event) + "\n" for event in self.events())
        path.write_text(text)
        return path

    def _tell(self, actor: str, event: str, t_ns: int | None = None, **keys: Any) -> None:
        at = self._now if t_ns is None else t_ns
        self.lines.append({"t_ns": at, "seq": 0, "actor": actor, "event": event, **keys})

    def _spread(self, mean: int) -> int:
        return max(1, int(mean * self._random.lognormvariate(0, 0.25)))

    def _request(self) -> None:
        for state in ("queued", "admitted"):
            self._tell("coordinator", "request", request=0, state=state, prompt_tokens=self.prompt)
            self._now += 200 * US
        self._tell("coordinator", "phase", phase="prefill")
        self._batch(self.sequences)
        self._step(0, "prefill", self.prompt)
        self._token(0)
        self._tell("coordinator", "phase", phase="decode")
        for step in range(1, self.tokens):
            if self.faults:
                self._fault_at(step)
            if self.sequences > 1 and step == self.tokens // 2:
                self.sequences -= 1
                self._batch(self.sequences)
            self._step(step, "decode", self.sequences)
            self._token(step)
        self._tell("coordinator", "request", request=0, state="finished", reason="length",
                   prompt_tokens=self.prompt, tokens=self.tokens)  # fmt: skip
        self._tell("coordinator", "phase", phase="idle")

    def _token(self, index: int) -> None:
        self._tell("coordinator", "token", request=0, index=index)
        self._now += self._spread(300 * US)

    def _batch(self, sequences: int) -> None:
        self._tell("coordinator", "batch", sequences=sequences, hot_clusters=sequences,
                   hot_share=min(0.4 + 0.1 * sequences, 1.0))  # fmt: skip
        self._tell("coordinator", "graph", graph=f"decode.{sequences}", previous="prefill")

    def _fault_at(self, step: int) -> None:
        if step == self.tokens // 4:
            self._tell("io", "fault", kind="read_error", target="io")
        elif step == self.tokens // 3:
            self._tell("worker.0", "fault", kind="worker_lost", target="worker.0")
            self._tell("coordinator", "restart", target="worker.0", generation=2, ns=900 * MS)
            self._now += 950 * MS
        elif step == self.tokens // 2:
            self._tell("coordinator", "fault", kind="memory_shrink", target="cache")
            self._tell("cache", "plan", what="resize", cold_slots=2048, memory_bytes=2 << 30)

    def _has_detail(self, step: int) -> bool:
        is_chosen = step < FIRST_DETAILED or step % DETAIL_EVERY == 0
        return self.detail == "all" or (self.detail == "auto" and is_chosen)

    def _step(self, step: int, phase: str, tokens: int) -> None:
        detail, begin = self._has_detail(step), self._now
        self._sums = dict.fromkeys(("compute", "stall", "wait", "reads", "bytes", "misses"), 0)
        for layer in range(self.layers):
            self._layer(step, layer, detail, 8 if phase == "prefill" else 1)
        needed = self.layers * self.clusters * 40
        misses = min(self._sums["misses"], needed)
        self._tell("coordinator", "step", begin, ns=self._now - begin, step=step, phase=phase,
                   graph=phase if phase == "prefill" else f"decode.{self.sequences}",
                   tokens=tokens, sequences=self.sequences, compute_ns=self._sums["compute"],
                   stall_ns=self._sums["stall"], wait_ns=self._sums["wait"],
                   executors=self.workers + self.npus, bytes=self._sums["bytes"],
                   reads=self._sums["reads"], needed=needed, hits=needed - misses, misses=misses,
                   predicted=needed + 20, active=needed - 10, detail=detail)  # fmt: skip
        self._tell("cache", "residency", step=step, admitted=misses, evicted=misses // 2,
                   resident=min(4096, 64 * (step + 1)), slots=4096)  # fmt: skip

    def _layer(self, step: int, layer: int, detail: bool, weight: int) -> None:
        begin, ends = self._now, []
        read_end = self._reads(step, layer, detail, begin)
        for index in range(self.npus):
            ends.append(self._npu(f"npu.{index}", step, layer, detail, begin, weight))
        for index in range(self.workers):
            ends.append(self._worker(f"worker.{index}", step, layer, detail, begin, read_end))
        self._now = max(ends)
        self._sums["wait"] += sum(self._now - end for end in ends)

    def _op(self, actor: str, detail: bool, at: int, ns: int, **keys: Any) -> int:
        self._sums["compute"] += ns
        if detail:
            self._tell(actor, "op", at, ns=ns, **keys)
        return at + ns

    def _npu(self, actor: str, step: int, layer: int, detail: bool, at: int, weight: int) -> int:
        ns = self._spread(320 * US * weight)
        return self._op(actor, detail, at, ns, wait_ns=self._random.randrange(20 * US), step=step,
                        op=layer * 10, kind="feed_forward", layer=layer, units=1)  # fmt: skip

    def _worker(
        self, actor: str, step: int, layer: int, detail: bool, at: int, read_end: int
    ) -> int:
        for place, (kind, mean) in enumerate((("norm", 6), ("matmul", 50), ("attention", 40))):
            gap = self._random.randrange(4 * US)
            at = self._op(actor, detail, at + gap, self._spread(mean * US), wait_ns=gap, step=step,
                          op=layer * 10 + place, kind=kind, layer=layer, units=4)  # fmt: skip
        begin = at
        for cluster in range(self.clusters):
            for stage in ("pred", "gc", "udc"):
                ns = self._spread(18 * US)
                if stage == "udc" and cluster == self.clusters - 1 and read_end > at:
                    at = self._wait(actor, step, layer, detail, at, read_end)
                if detail:
                    self._tell(actor, "cluster", at, ns=ns, step=step, layer=layer, neurons=40,
                               cluster=cluster, stage=stage, misses=cluster % 2)  # fmt: skip
                at += ns
        return self._op(actor, detail, begin, at - begin, wait_ns=0, step=step, op=layer * 10 + 5,
                        kind="clusters", layer=layer, units=self.clusters)  # fmt: skip

    def _wait(self, actor: str, step: int, layer: int, detail: bool, at: int, until: int) -> int:
        self._sums["stall"] += until - at
        self._sums["compute"] -= until - at
        if detail:
            self._tell(actor, "cluster", at, ns=until - at, step=step, layer=layer, stage="wait",
                       cluster=self.clusters - 1, neurons=40, misses=2)  # fmt: skip
        return until

    def _reads(self, step: int, layer: int, detail: bool, begin: int) -> int:
        """Submit a layer's reads; when the last is complete."""
        end, rate = begin, 0.4 + 0.6 * 0.97**step
        count = sum(self._random.random() < rate for _ in range(self.reads_a_layer))
        for _ in range(count):
            at, ns = begin + self._random.randrange(120 * US), self._spread(170 * US)
            self._read += 1
            if detail:
                self._tell("io", "read", at, ns=ns, read=self._read, layer=layer, bytes=8192,
                           neuron=self._random.randrange(11008), status=0, step=step)  # fmt: skip
            end = max(end, at + ns)
        self._sums["reads"] += count
        self._sums["misses"] += count
        self._sums["bytes"] += 8192 * count
        return end
