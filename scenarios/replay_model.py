"""The model of a replay: a file that is there, or a small sparse one of random weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from polyneuron.config import DEFAULT_LOGIT_ROWS, DEFAULT_REQUESTS, EngineConfig, FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.planning.bundles import neuron_rows
from polyneuron.planning.source import open_source
from polyneuron.profiling.predictors import PredictorSettings
from polyneuron.profiling.profile import make_profile
from polyneuron.scenarios.engine_settings import Policy
from polyneuron.scenarios.model_file import model_path
from polyneuron.scenarios.script import Script
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.write import SynthSettings, synthesize

SHAPE = "bamboo-7b"
"""Whose arithmetic the small model has: dReLU, where most neurons are exactly zero."""
CALIBRATION_TOKENS = 256
LOW_RANK = PredictorSettings(rank=32)
"""Predictors that are fitted in a second."""
POLICIES: dict[Policy, dict[str, Any]] = {
    Policy.POWERINFER2: {},
    Policy.PIPELINE: {},
    Policy.CACHE: {"matrix_barrier": True},
    Policy.BUNDLES: {"matrix_barrier": True, "keep_neurons": False},
}
"""Fields of EngineConfig that make the engine behave as a policy does."""
PREDICTED_ONLY = (Policy.CACHE, Policy.BUNDLES)


def check_replayable(script: Script) -> None:
    """ConfigError for what only a simulation can do."""
    policy, mode = script.engine.policy, _mode(script)
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise ConfigError(
            f"{script.path}: engine.policy: {policy} is only simulated; replay knows {known}"
        )
    if policy in PREDICTED_ONLY and mode is not FeedForwardMode.PREDICTED:
        raise ConfigError(
            f'{script.path}: engine.policy: replay knows {policy} in mode = "predicted" only'
        )


def _mode(script: Script) -> FeedForwardMode:
    return script.replay.mode or script.engine.mode


def replay_model(script: Script, folder: Path) -> Path:
    """The model's file: the one that is named, or a small one written into `folder`."""
    if script.replay.model is None and (named := model_path(script)) is not None:
        return named
    if script.replay.model is not None:
        if not script.replay.model.is_file():
            raise ConfigError(f"{script.path}: replay.model: {script.replay.model} is no file")
        return script.replay.model
    path = folder / "model.ncf"
    for _ in synthesize(_settings(script), path):
        pass
    if _mode(script) is FeedForwardMode.PREDICTED:
        vocab = script.replay.vocab
        make_profile(path, random_prompt(script.seed, "text", CALIBRATION_TOKENS, vocab), LOW_RANK)
    return path


def _settings(script: Script) -> SynthSettings:
    shape = script.replay
    try:
        spec = shape_spec(
            SHAPE, num_layers=shape.layers, d_model=shape.hidden, d_ff=shape.neurons,
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, vocab_size=shape.vocab,
        )  # fmt: skip
        sparsity = 1.0 - shape.active
        return SynthSettings(spec, sparsity=sparsity, seed=script.seed, is_hot_first=True)
    except ConfigError as error:
        raise ConfigError(f"{script.path}: replay: {error}") from None


def random_prompt(seed: int, name: object, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids of a made-up prompt: the same for the same seed and name; no control tokens."""
    chance = random.Random(f"{seed}:{name}")
    return [chance.randrange(3, vocab_size) for _ in range(num_tokens)]


def engine_config(script: Script, path: Path) -> EngineConfig:
    """How the engine of a replay is opened."""
    wanted, here = script.engine, script.replay
    has_own = here.memory_bytes is not None or here.ffn_resident is not None
    memory = here.memory_bytes if has_own else wanted.memory_bytes
    mode, most = _mode(script), max(request.best_of for request in script.requests)
    num_sequences = max(wanted.max_sequences, most)
    return EngineConfig(
        num_ctx=wanted.num_ctx,
        num_workers=here.workers,
        num_npu_threads=here.npu_threads,
        npu=here.npu,
        max_tokens=max(wanted.max_tokens, num_sequences),
        max_sequences=num_sequences,
        max_requests=max(len(script.requests) * most, DEFAULT_REQUESTS),
        max_logit_rows=max(num_sequences, DEFAULT_LOGIT_ROWS),
        memory_bytes=memory or 0,
        ffn_resident=here.ffn_resident if has_own else wanted.ffn_resident,
        mode=mode,
        hot_clusters=_hot_clusters(script, path, mode),
        deterministic=wanted.deterministic,
        queue_depth=wanted.queue_depth,
        **POLICIES[wanted.policy],
    )


def _hot_clusters(script: Script, path: Path, mode: FeedForwardMode) -> tuple[int, ...]:
    """The hot shares in whole clusters; only predicted mode has hot ones."""
    if mode is not FeedForwardMode.PREDICTED or not script.engine.hot_shares:
        return ()
    rows = neuron_rows(open_source(path, Layout.BUNDLES).manifest)
    return tuple(round(share * rows.num_clusters) for share in script.engine.hot_shares)
