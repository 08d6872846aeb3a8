"""Options that several commands share, each with its environment twin (INTERFACE)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from polyneuron.config import EngineConfig, FeedForwardMode, KvType, env_name
from polyneuron.cores import this_machine
from polyneuron.errors import ConfigError
from polyneuron.model.locate import locate_model
from polyneuron.model.sampling import SETTINGS, SamplingParams
from polyneuron.sizes import parse_size
from polyneuron.timeline import check_writable
from polyneuron.timeline_events import TraceDetail

SAMPLING = "Sampling"
ENGINE = "Engine"
OUTPUT = "Output"


def option(*flags: str, panel: str | None = None, text: str, **extra: Any) -> Any:
    """A typer option whose environment twin is named after its long flag."""
    long_flag = next(flag for flag in flags if flag.startswith("--"))
    return typer.Option(
        *flags, help=text, envvar=env_name(long_flag.split("/")[0]), show_envvar=False,
        rich_help_panel=panel, **extra,
    )  # fmt: skip


def _default(name: str) -> Any:
    setting = SETTINGS[name]
    return int(setting.default) if setting.whole else setting.default


Model = Annotated[
    str, option("--model", "-m", text="a .gguf or .ncf file, a folder, or the word smollm2")
]
Predict = Annotated[
    int, option("--predict", "-n", "--n-predict", text="tokens to generate; -1: to the end")
]
CtxSize = Annotated[
    int,
    option("--ctx-size", "-c", panel=ENGINE, min=0, text="positions; 0: the model's, up to 4096"),
]
Threads = Annotated[
    int,
    option(
        "--threads",
        "-t",
        "--workers",
        panel=ENGINE,
        min=0,
        text="CPU workers; 0: one a fast core",
    ),
]
ThreadsBatch = Annotated[
    int,
    option(
        "--threads-batch",
        "-tb",
        panel=ENGINE,
        min=-1,
        text="for prompts: the NPU executor's; -1: as -t, 0: CPU workers do",
    ),
]
Npu = Annotated[
    str, option("--npu", panel=ENGINE, text="who computes prompts: native, openvino[:DEVICE], none")
]
CpuMask = Annotated[
    str, option("--cpu-mask", "-C", panel=ENGINE, text="cores to use, hexadecimal: f0 is 4 to 7")
]
CpuRange = Annotated[
    str, option("--cpu-range", "-Cr", panel=ENGINE, text="cores to use as well, as 4-7 or 0,2,4-7")
]
KvTypeOption = Annotated[
    KvType,
    option("--kv-type", panel=ENGINE, text="keys and values are stored as: f16; q8, q4: lossy"),
]
Memory = Annotated[
    str, option("--memory", panel=ENGINE, text="all it may take: 3GiB, 75% of the model; 0: free")
]
FfnResident = Annotated[
    float,
    option(
        "--ffn-resident",
        panel=ENGINE,
        text="share of feed forward kept, at most; -1: all that fits",
    ),
]
Mode = Annotated[
    FeedForwardMode,
    option(
        "--mode",
        panel=ENGINE,
        text="feed forward: all neurons, those that are not zero, or those predicted (lossy)",
    ),
]
PlanPath = Annotated[
    str | None, option("--plan", panel=ENGINE, text="a file of polyneuron plan -o: how to run")
]
Deterministic = Annotated[
    bool, option("--deterministic", panel=ENGINE, text="hash every step's logits")
]
Trace = Annotated[
    str | None, option("--trace", panel=OUTPUT, text="a timeline goes to this file, JSON lines")
]
Detail = Annotated[
    TraceDetail,
    option("--trace-detail", panel=OUTPUT, text="steps whose ops, clusters and reads are in it"),
]
Json = Annotated[bool, option("--json", panel=OUTPUT, text="one JSON object on stdout")]

Temp = Annotated[float, option("--temp", panel=SAMPLING, text="0: always the likeliest token")]
TopK = Annotated[int, option("--top-k", panel=SAMPLING, text="0: off")]
TopP = Annotated[float, option("--top-p", panel=SAMPLING, text="1: off")]
MinP = Annotated[float, option("--min-p", panel=SAMPLING, text="0: off")]
Typical = Annotated[float, option("--typical", panel=SAMPLING, text="1: off")]
RepeatLastN = Annotated[
    int, option("--repeat-last-n", panel=SAMPLING, text="tokens penalties look at; 0: off")
]
RepeatPenalty = Annotated[float, option("--repeat-penalty", panel=SAMPLING, text="1: off")]
PresencePenalty = Annotated[float, option("--presence-penalty", panel=SAMPLING, text="0: off")]
FrequencyPenalty = Annotated[float, option("--frequency-penalty", panel=SAMPLING, text="0: off")]
Seed = Annotated[int, option("--seed", "-s", panel=SAMPLING, text="-1: random")]

BestOf = Annotated[
    int,
    option(
        "--best-of",
        panel=SAMPLING,
        text="answers to draw; the likeliest is printed (--temp 0: all alike)",
    ),
]


PLANNED_FLAGS = {
    "-c": "num_ctx", "-t": "num_workers", "-tb": "num_npu_threads", "--memory": "memory_bytes",
    "--ffn-resident": "ffn_resident", "--mode": "mode", "-C or -Cr": "cores", "--npu": "npu",
    "--kv-type": "kv_type",
}  # fmt: skip


def sampling_params(**values: Any) -> SamplingParams:
    """The parameters the flags name; a value out of range is a ConfigError naming the flag."""
    return SamplingParams(**values)


def budget(memory: str, ffn_resident: float, mode: FeedForwardMode, model: str) -> dict[str, Any]:
    """The fields of EngineConfig that `--memory`, `--ffn-resident` and `--mode` mean."""
    if not (ffn_resident == -1.0 or 0.0 <= ffn_resident <= 1.0):
        raise ConfigError(f"--ffn-resident {ffn_resident}: give 0 to 1, or -1 for all that fit")
    whole = locate_model(model).stat().st_size if memory.strip().endswith("%") else None
    return {
        "memory_bytes": parse_size(memory, "--memory", whole),
        "ffn_resident": None if ffn_resident < 0 else ffn_resident,
        "mode": mode,
    }


def planned(config: EngineConfig, path: Path, model: str) -> EngineConfig:
    """The configuration a plan file asks for; a flag that would change it is refused."""
    from polyneuron.host_memory import HostMemory
    from polyneuron.planning.plan_file import check_plan, read_plan
    from polyneuron.planning.source import open_source

    plan, plain = read_plan(path), EngineConfig()
    settings = plan.settings()
    for flag, name in PLANNED_FLAGS.items():
        if name in settings and getattr(config, name) != getattr(plain, name):
            raise ConfigError(f"{flag}: the plan {path} sets it; edit the plan, or leave one out")
    source = open_source(locate_model(model))
    check_plan(plan, path, source, HostMemory().available().num_bytes)
    for key, cores in plan.cores.items():
        this_machine().check(cores, f"--plan {path}: engine.{key}")
    return replace(config, **settings)


def traced(path: str | None, detail: TraceDetail) -> dict[str, Any]:
    """The fields that `--trace` and `--trace-detail` mean, after a look at whether it can be."""
    if path is not None:
        check_writable(Path(path))
    elif detail is not TraceDetail.AUTO:
        raise ConfigError(f"--trace-detail {detail}: no timeline is written; add --trace FILE")
    return {"trace": path, "trace_detail": detail}


DEFAULTS: dict[str, Any] = {name: _default(name) for name in SETTINGS}
