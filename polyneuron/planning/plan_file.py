"""Plan files: how a model is to be run, as TOML that people read and edit.

Keys are checked one by one, so that a slip of the pen is named and not passed over.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyneuron.backends.spec import FORMS, BackendKind, parse_npu
from polyneuron.config import MAX_QUEUE_DEPTH, MAX_SPARSE_TOKENS, FeedForwardMode, KvType
from polyneuron.errors import ConfigError
from polyneuron.io.content_key import content_key
from polyneuron.io.predictor_file import model_key
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.planning.planner import Plan
from polyneuron.planning.source import ModelSource
from polyneuron.sizes import parse_size, show_size

FORMAT_VERSION = 1
MAX_BATCH = 64
VARIANTS = ("hot_on_npu", "matrix_barrier", "keep_neurons")
"""Keys of the table `engine` that a file need not have; fields of EngineConfig of that name."""

SPARSE = "sparse_prompt_tokens"
"""A key that the file need not have: it says nothing of models in tiles, nor in predicted mode."""

CORE_LISTS = {
    "cores": "executors and reader keep to these",
    "io_cores": "best to read from first: the reader keeps to the first without a worker",
}
"""The same, with what is written beside them."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan says; counts as in EngineConfig."""

    model_file: str
    model_key: str
    memory_bytes: int
    ffn_resident: float
    """At most this share of the feed forward stays."""
    num_ctx: int
    mode: FeedForwardMode
    num_workers: int
    num_npu_threads: int
    queue_depth: int
    lookahead: bool
    hot_clusters: Mapping[int, int] = field(default_factory=dict)
    """Of every layer, by the number of sequences that run at once."""
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Those of CORE_LISTS that the file names: on most machines neither."""
    variants: Mapping[str, bool] = field(default_factory=dict)
    """Those of VARIANTS that the file names: ways to run that a plan never chooses."""
    kv_type: KvType | None = None
    """What keys and values are stored as, where the file names it."""
    npu: str | None = None
    """Who computes prompts, where the file names it, as `--npu` does."""
    sparse_prompt_tokens: int | None = None
    """Prompts up to this length read neurons, longer ones layers; None: the file does not say."""

    def settings(self) -> dict[str, Any]:
        """The fields of EngineConfig that it sets."""
        return {
            "memory_bytes": self.memory_bytes,
            "ffn_resident": self.ffn_resident if self.ffn_resident < 1 else None,
            "num_ctx": self.num_ctx,
            "mode": self.mode,
            "num_workers": self.num_workers,
            "num_npu_threads": self.num_npu_threads,
            "queue_depth": self.queue_depth,
            "lookahead": self.lookahead,
            "hot_clusters": self._hot_by_batch(),
            "sparse_prompt_tokens": self.sparse_prompt_tokens,
            **self.cores,
            **self.variants,
            **({} if self.kv_type is None else {"kv_type": self.kv_type}),
            **self._npu(),
        }

    def _npu(self) -> dict[str, Any]:
        """What the file says of it; `none` has no threads."""
        if self.npu is None:
            return {}
        return {"npu": self.npu} | ({"num_npu_threads": 0} if self.npu == BackendKind.NONE else {})

    def _hot_by_batch(self) -> tuple[int, ...]:
        """For 1, 2, … sequences; a number that is not named has what the next smaller one has."""
        if not any(self.hot_clusters.values()):
            return ()
        hot = []
        for batch in range(1, max(self.hot_clusters) + 1):
            known = [number for number in self.hot_clusters if number <= batch]
            hot.append(self.hot_clusters[max(known)] if known else 0)
        return tuple(hot)


def source_key(source: ModelSource) -> str:
    """Names a model file by what it holds."""
    return content_key(source.header) if source.header else model_key(source.manifest)


def plan_file(plan: Plan, source: ModelSource, num_ctx: int) -> PlanFile:
    """What is to be written of a plan."""
    chosen = plan.chosen
    knobs, config = chosen.knobs, chosen.budget.layout.config
    return PlanFile(
        source.path.name, source_key(source), chosen.budget.limit_bytes,
        1.0 if config.ffn_resident is None else config.ffn_resident, num_ctx,
        FeedForwardMode(knobs.mode), knobs.workers, config.num_npu_threads, knobs.queue_depth,
        knobs.is_looking_ahead,
        {batch: choice.hot_clusters for batch, choice in plan.by_batch.items()},
        {key: cores for key in CORE_LISTS if (cores := getattr(config, key))},
        sparse_prompt_tokens=config.sparse_prompt_tokens,
        kv_type=config.kv_type,
    )  # fmt: skip


def plan_text(plan: Plan, file: PlanFile) -> str:
    """The file's text."""
    cost = plan.chosen.cost
    hits = f", {cost.hit_rate:.1%} of needed neurons in memory" if cost.hit_rate else ""
    counted = "counted in a text" if plan.is_measured else "supposed: run polyneuron profile"
    read, mib = f"{cost.bytes_per_token / 2**20:.1f}", file.memory_bytes >> 20
    budget = f"{mib}MiB" if mib << 20 == file.memory_bytes else f"{file.memory_bytes}"
    cores = [f"{key} = {list(ids)}  # {CORE_LISTS[key]}" for key, ids in file.cores.items()]
    hot = [f"{batch} = {count}" for batch, count in sorted(file.hot_clusters.items())]
    lines = [
        f"# How polyneuron is to run {_plain(file.model_file)}. Use it: run --plan FILE.",
        f"# Expected: {cost.tokens_per_s:.1f} tok/s, {read} MiB read for each token{hits}.",
        f"# {plan.reason()}; how often neurons are active is {counted}.",
        "",
        f"format_version = {FORMAT_VERSION}",
        "",
        "[model]",
        f"file = {_quoted(file.model_file)}  # its name when this was planned; may change",
        f"key = {_quoted(file.model_key)}  # its content; may not",
        "",
        "[memory]",
        f"budget = {_quoted(budget)}  # all that the product may take; bytes, or as 3GiB",
        f"ffn_resident = {file.ffn_resident}  # at most this share of the feed forward stays",
        f"context = {file.num_ctx}  # positions",
        f"kv_type = {_quoted(str(file.kv_type or KvType.F16))}  # of keys and values: f16, q8, q4",
        "",
        "[engine]",
        f"mode = {_quoted(str(file.mode))}  # dense, exact or predicted",
        f"workers = {file.num_workers}  # CPU workers",
        f"npu_threads = {file.num_npu_threads}  # of the modelled NPU, in prompts only",
        *cores,
        f"queue_depth = {file.queue_depth}  # reads of neurons under way at once",
        f"lookahead = {_bool(file.lookahead)}  # whether reads begin before attention; predicted",
        *_sparse_line(file),
        "",
        "# Clusters of every layer that stay in memory as a whole, by the number of sequences",
        "# that run at once; predicted mode only.",
        "[hot_clusters]",
        *hot,
    ]
    return "\n".join(lines) + "\n"


def _sparse_line(file: PlanFile) -> list[str]:
    if file.sparse_prompt_tokens is None:
        return []
    what = "prompts up to this length read neurons, longer ones layers in order"
    return [f"sparse_prompt_tokens = {file.sparse_prompt_tokens}  # {what}"]


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    whole = text.encode("utf-8", "replace").decode()  # a name that is no UTF-8 has half characters
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def read_plan(path: Path) -> PlanFile:
    """Read a plan; ConfigError names the file, the key and the cure."""
    try:
        found = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--plan {path}: not a TOML file: {error}") from None
    table = _Table(path, "", found)
    version = table.whole("format_version", 1, 1 << 30)
    if version != FORMAT_VERSION:
        raise table.fault("format_version", f"is {version}", f"plan anew for {FORMAT_VERSION}")
    model, memory = table.table("model"), table.table("memory")
    engine, hot = table.table("engine"), table.table("hot_clusters")
    plan = PlanFile(
        model_file=model.text("file"),
        model_key=model.text("key"),
        memory_bytes=memory.size("budget"),
        ffn_resident=memory.share("ffn_resident"),
        num_ctx=memory.whole("context", 1, 1 << 30),
        kv_type=memory.kv_type("kv_type") if memory.has("kv_type") else None,
        mode=engine.mode("mode"),
        num_workers=engine.whole("workers", 1, MAX_EXECUTORS),
        num_npu_threads=engine.whole("npu_threads", 0, MAX_EXECUTORS),
        queue_depth=engine.whole("queue_depth", 1, MAX_QUEUE_DEPTH),
        lookahead=engine.flag("lookahead"),
        hot_clusters=hot.counts(),
        cores={key: engine.cores(key) for key in CORE_LISTS if engine.has(key)},
        variants={key: engine.flag(key) for key in VARIANTS if engine.has(key)},
        npu=engine.npu("npu") if engine.has("npu") else None,
        sparse_prompt_tokens=engine.whole(SPARSE, 0, MAX_SPARSE_TOKENS)
        if engine.has(SPARSE)
        else None,
    )
    for each in (table, model, memory, engine, hot):
        each.refuse_others()
    return plan


def check_plan(plan: PlanFile, path: Path, source: ModelSource, available_bytes: int) -> None:
    """Refuse a plan of another model, or one that needs more memory than there is now."""
    if plan.model_key != source_key(source):
        raise ConfigError(
            f"--plan {path}: was made for {_plain(plan.model_file)}, whose content differs from "
            f"{source.path}; plan that with polyneuron plan -m {source.path} -o {path}"
        )
    if plan.memory_bytes > available_bytes:
        raise ConfigError(
            f"--plan {path}: memory.budget is {show_size(plan.memory_bytes)} and "
            f"{show_size(available_bytes)} are free now; plan anew with --memory "
            f"{available_bytes >> 20}MiB, or free some"
        )


class _Table:
    """One table of the file, with what has been asked for."""

    def __init__(self, path: Path, name: str, found: Mapping[str, Any]) -> None:
        self._path, self._name, self._found = path, name, found
        self._asked: set[str] = set()

    def fault(self, key: str, what: str, cure: str) -> ConfigError:
        """An error that names file and key."""
        dotted = f"{self._name}.{key}" if self._name else key
        return ConfigError(f"--plan {self._path}: {_plain(dotted)} {what}; {cure}")

    def _take(self, key: str, cure: str, is_right: Callable[[Any], bool]) -> Any:
        self._asked.add(key)
        if key not in self._found:
            raise self.fault(key, "is missing", cure)
        value = self._found[key]
        if not is_right(value):
            raise self.fault(key, f"is {str(value)[:60]!a}", cure)
        return value

    def has(self, key: str) -> bool:
        return key in self._found

    def table(self, key: str) -> _Table:
        found = self._take(key, f"write a table [{key}]", lambda v: isinstance(v, dict))
        return _Table(self._path, key, found)

    def text(self, key: str) -> str:
        return str(self._take(key, "give a string", lambda v: isinstance(v, str)))

    def flag(self, key: str) -> bool:
        return bool(self._take(key, "give true or false", lambda v: isinstance(v, bool)))

    def whole(self, key: str, low: int, high: int) -> int:
        cure = f"give a whole number from {low} to {high}"
        return int(self._take(key, cure, lambda v: _is_whole(v) and low <= v <= high))

    def cores(self, key: str) -> tuple[int, ...]:
        def is_right(value: Any) -> bool:
            return isinstance(value, list) and all(_is_whole(v) and v >= 0 for v in value)

        return tuple(self._take(key, "give numbers of cores, as [4, 5]", is_right))

    def share(self, key: str) -> float:
        def is_share(value: Any) -> bool:
            return isinstance(value, int | float) and value is not True and 0 <= value <= 1

        return float(self._take(key, "give a number from 0 to 1", is_share))

    def mode(self, key: str) -> FeedForwardMode:
        names = [str(mode) for mode in FeedForwardMode if mode is not FeedForwardMode.AUTO]
        cure = f"give one of {', '.join(names)}"
        return FeedForwardMode(self._take(key, cure, lambda v: isinstance(v, str) and v in names))

    def kv_type(self, key: str) -> KvType:
        cure = f"give one of {', '.join(KvType)}"
        return KvType(self._take(key, cure, lambda v: isinstance(v, str) and v in list(KvType)))

    def npu(self, key: str) -> str:
        text = self.text(key)
        try:
            parse_npu(text)
        except ConfigError:
            raise self.fault(key, f"is {text[:60]!a}", f"give {FORMS}") from None
        return text

    def size(self, key: str) -> int:
        cure = 'give bytes, or a size as "3GiB"'
        value = self._take(key, cure, lambda v: isinstance(v, str) or (_is_whole(v) and v > 0))
        try:
            return value if isinstance(value, int) else parse_size(value, f"memory.{key}")
        except ConfigError:
            raise self.fault(key, f"is {value[:60]!a}", cure) from None

    def counts(self) -> dict[int, int]:
        """Whole numbers by whole numbers."""
        counts = {}
        for key in self._found:
            if not (key.isascii() and key.isdigit() and 1 <= int(key) <= MAX_BATCH):
                raise self.fault(key, "is no number of sequences", f"give 1 to {MAX_BATCH}")
            counts[int(key)] = self.whole(key, 0, 1 << 20)
        return counts

    def refuse_others(self) -> None:
        """Raise ConfigError for a key that nobody asked for."""
        for key in self._found:
            if key not in self._asked:
                known = ", ".join(sorted(self._asked)) or "none"
                raise self.fault(key, "is not known", f"known here: {known}; take it out")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
