"""A checkpoint's config.json as the metadata that a GGUF of the same model has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_values import quoted
from polyneuron.io.json_file import read_json
from polyneuron.model.architecture import ACTIVATION_KEY
from polyneuron.model.hf_families import HF_FAMILIES, HF_TYPES, NEUTRAL, HfFamily
from polyneuron.model.rope import ROPE_LONG, ROPE_SHORT

MAX_SHOWN = 60
ACTIVATION_NAMES = ("hidden_activation", "hidden_act", "activation_function")
LONGROPE = ("longrope", "su")
SCALED_BY_FACTOR = ("linear", "yarn")


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The file, and the row of the table that reads it."""

    path: Path
    values: Mapping[str, Any]
    family: HfFamily

    def fail(self, message: str) -> NoReturn:
        """FormatError naming the file."""
        raise FormatError(f"{self.path}: {message}")

    def unsupported(self, message: str) -> NoReturn:
        """UnsupportedError naming the file."""
        raise UnsupportedError(f"{self.path}: {message}")

    def get(self, key: str) -> Any:
        """A value, or what stands for it when the file leaves it out."""
        value = self.values.get(key)
        return self.family.defaults.get(key) if value is None else value

    def count(self, key: str) -> int:
        """A positive whole number; FormatError naming the key."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(f"{key} is {shown(value)}; a positive whole number is expected")
        return value

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        if self.get("head_dim") is not None:
            return self.count("head_dim")
        return max(self.count("hidden_size") // self.count("num_attention_heads"), 1)

    @property
    def rope(self) -> Mapping[str, Any]:
        """The rotary embedding, as newer files keep it: in one place, with its base."""
        for key in ("rope_parameters", "rope_scaling"):
            found = self.values.get(key)
            if isinstance(found, Mapping):
                found = found.get("full_attention", found)  # there are others for windows
            if isinstance(found, Mapping):
                return {"rope_theta": self.values.get("rope_theta"), **found}
            if found is not None:
                self.fail(f"{key} is {shown(found)}; an object is expected")
        return {"rope_theta": self.values.get("rope_theta")}


def shown(value: object) -> str:
    """A value of JSON as it may stand in a one-line message."""
    text = quoted(value) if isinstance(value, str) else ascii(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def read_config(folder: Path) -> HfConfig:
    """Read config.json and find its family; UnsupportedError names what can be read."""
    path = folder / "config.json"
    values = read_json(path)
    model_type, made_for = values.get("model_type"), values.get("architectures")
    if not isinstance(model_type, str):
        raise FormatError(f"{path}: model_type is missing; fetch it again")
    if model_type not in HF_FAMILIES:
        by = f" ({shown(made_for[0])})" if isinstance(made_for, list) and made_for else ""
        raise UnsupportedError(
            f"{path}: model_type {quoted(model_type)}{by} is not supported; supported: {HF_TYPES}"
        )
    family = HF_FAMILIES[model_type]
    values = dict(family.normalise(values)) if family.normalise else values
    config = HfConfig(path, values, family)
    _check_purpose(config, made_for)
    quantised, by_mlx = values.get("quantization_config"), values.get("quantization")
    if quantised or by_mlx:
        how = "MLX" if by_mlx else None
        if isinstance(quantised, Mapping):
            how = quantised.get("quant_method", how)
        config.unsupported(
            f"a checkpoint quantised by {shown(how)}; give the BF16, F16 or F32 one it was made "
            "of, or a GGUF"
        )
    for key, neutral in NEUTRAL + config.family.settled:
        if values.get(key) not in neutral:
            config.unsupported(f"{key} = {shown(values.get(key))} is not supported")
    return config


def _check_purpose(config: HfConfig, architectures: Any) -> None:
    """UnsupportedError for the body of a model alone, or with another head than a text's."""
    if not isinstance(architectures, list) or not architectures:
        return
    if not any("ForCausalLM" in str(name) for name in architectures):
        config.unsupported(
            f"architectures is {shown(architectures)}: an embedding model, a classifier or a part "
            "of a model, which gives no text; give one whose architecture is ...ForCausalLM"
        )


def config_metadata(config: HfConfig) -> dict[str, Any]:
    """The keys `<architecture>.*` of a GGUF; FormatError naming what config.json lacks."""
    family = config.family
    missing = [key for key in family.required if config.get(key) is None]
    if missing:
        config.fail(f"keys missing: {', '.join(missing)}; fetch it again")
    found: dict[str, Any] = dict(family.constants)
    for key, name in {**family.optional, **family.required}.items():
        value = config.get(key)
        if value is not None:
            _check_number(config, key, value)
            found[name] = value
    found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    found |= _window(config) | _activation(config) | _rope(config) | _scores(config)
    return {f"{family.family}.{name}": value for name, value in found.items()}


def _check_number(config: HfConfig, key: str, value: Any) -> None:
    if key.endswith("_prob"):
        is_right = isinstance(value, bool)
    elif key.endswith(("_eps", "epsilon")):
        is_right = _is_positive(value)
    else:
        config.count(key)
        is_right = True
    if not is_right:
        config.fail(f"{key} is {shown(value)}, which it cannot be; fetch it again")


def _window(config: HfConfig) -> dict[str, Any]:
    """The attention window, where some layer has one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    is_used = config.get("use_sliding_window") is not False
    if isinstance(kinds, list):
        is_used = "sliding_attention" in kinds
    if "sliding_window" not in config.values:
        return {}
    if window is None or not is_used:
        return {"attention.sliding_window": 0}
    found = {"attention.sliding_window": window}
    if isinstance(kinds, list) and "full_attention" in kinds:
        found["attention.sliding_window_pattern"] = [kind != "full_attention" for kind in kinds]
    return found


def _scores(config: HfConfig) -> dict[str, Any]:
    """Caps, where null means none, and a scale that does not follow from the head's size."""
    found: dict[str, Any] = {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config.values:
            value = config.values[key]
            found[key] = 0.0 if value is None else _positive(config, key, value)
    scalar = config.get("query_pre_attn_scalar")
    if scalar is not None and scalar != config.head_dim:
        found["attention.scale"] = _positive(config, "query_pre_attn_scalar", scalar) ** -0.5
    return found


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _positive(config: HfConfig, key: str, value: Any) -> float:
    if not _is_positive(value):
        config.fail(f"{key} is {shown(value)}; a positive number is expected")
    return float(value)


def _activation(config: HfConfig) -> dict[str, Any]:
    key = next((key for key in ACTIVATION_NAMES if config.get(key) is not None), None)
    if key is None:
        return {}
    name = config.get(key)
    if not isinstance(name, str) or name not in config.family.activations:
        known = " ".join(config.family.activations)
        config.unsupported(f"{key} is {shown(name)}; supported for this model: {known}")
    value = config.family.activations[name]
    return {} if value is None else {ACTIVATION_KEY: value}


def _rope(config: HfConfig) -> dict[str, Any]:
    rope = config.rope
    theta, kind = rope.get("rope_theta"), rope.get("rope_type", rope.get("type"))
    base = config.family.rope_base if theta is None else theta
    if not isinstance(base, int | float) or isinstance(base, bool):
        config.fail(f"rope_theta is {shown(base)}; a number is expected")
    found: dict[str, Any] = {"rope.freq_base": float(base)} | _local_rope(config)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is not None:
        found["rope.dimension_count"] = int(config.head_dim * _number(config, rope, share))
    if kind in (None, "default", "llama3"):  # the last as a tensor, as in a GGUF
        return found
    if kind in LONGROPE:
        return found | _long(config, rope)
    if kind not in SCALED_BY_FACTOR:
        config.unsupported(
            f"rope_type is {shown(kind)}; supported: default linear llama3 yarn longrope, without "
            "dynamic factors"
        )
    found["rope.scaling.type"] = kind
    found["rope.scaling.factor"] = _number(config, rope, rope.get("factor"))
    return found | (_yarn(config, rope) if kind == "yarn" else {})


def _local_rope(config: HfConfig) -> dict[str, Any]:
    """The rotary base of layers with a window, where the file has one of their own."""
    ropes = config.values.get("rope_parameters")
    local = ropes.get("sliding_attention") if isinstance(ropes, Mapping) else None
    base = config.values.get("rope_local_base_freq")
    if isinstance(local, Mapping):
        if local.get("rope_type", "default") != "default":
            config.unsupported(f"rope_type {shown(local['rope_type'])} of windowed layers")
        base = local.get("rope_theta", base)
    return {} if base is None else {"rope.freq_base_swa": _positive(config, "rope_theta", base)}


def _yarn(config: HfConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    for key, neutral in (("attention_factor", None), ("mscale", None), ("mscale_all_dim", None),
                         ("truncate", True)):  # fmt: skip
        if rope.get(key, neutral) != neutral:
            config.unsupported(f"{key} = {shown(rope[key])} of yarn is not supported")
    original = rope.get("original_max_position_embeddings")
    return {
        "rope.scaling.original_context_length": original
        if original is not None
        else config.count("max_position_embeddings"),
        "rope.scaling.yarn_beta_fast": _number(config, rope, rope.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": _number(config, rope, rope.get("beta_slow") or 1.0),
    }


def _long(config: HfConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """LongRoPE's numbers; its divisors are tensors in a GGUF."""
    for key in ("short_mscale", "long_mscale"):
        if rope.get(key) is not None:
            config.unsupported(f"{key} = {shown(rope[key])} of longrope is not supported")
    key = "original_max_position_embeddings"
    original = rope.get(key, config.get(key))
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        config.fail(f"{key} is {shown(original)}; a whole number above 1 is expected for longrope")
    magnitude, factor = rope.get("attention_factor"), rope.get("factor")
    if magnitude is None:
        ratio = config.count("max_position_embeddings") / original
        ratio = max(1.0, ratio if factor is None else _number(config, rope, factor))
        magnitude = math.sqrt(1.0 + math.log(ratio) / math.log(original))
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": _number(config, rope, magnitude),
    }


def long_factors(config: HfConfig) -> dict[str, tuple[float, ...]]:
    """LongRoPE's divisors of frequencies by the tensors that hold them; nothing without."""
    rope = config.rope
    if rope.get("rope_type", rope.get("type")) not in LONGROPE:
        return {}
    found = {}
    for name, key in ((ROPE_SHORT, "short_factor"), (ROPE_LONG, "long_factor")):
        values = rope.get(key)
        if not isinstance(values, list) or not values:
            config.fail(f"longrope has no {key}; fetch it again")
        found[name] = tuple(_number(config, rope, value) for value in values)
    return found


def _number(config: HfConfig, rope: Mapping[str, Any], value: Any) -> float:
    if not _is_positive(value):
        config.fail(f"the rotary embedding {shown(dict(rope))} has no positive number where needed")
    return float(value)


def llama3_factors(config: HfConfig) -> tuple[float, ...]:
    """Divisors of the frequencies (head_dim / 2) that Llama 3.1 stretches; empty without."""
    rope = config.rope
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return ()
    factor, low, high, original = (
        _number(config, rope, rope.get(key))
        for key in (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        )
    )  # fmt: skip
    if high <= low:
        config.fail(f"high_freq_factor is {high:g}, not above low_freq_factor {low:g}")
    base = float(rope.get("rope_theta") or config.family.rope_base)
    dim, factors = config.head_dim, []
    for pair in range(dim // 2):
        wavelength = 2.0 * math.pi * base ** (2.0 * pair / dim)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors)
