"""How an engine runs and what it reads: the mode line, and the same as data (INTERFACE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyneuron.backends.spec import BackendKind, parse_npu, precision_of
from polyneuron.config import EngineConfig, KvType
from polyneuron.core_use import CoreUse
from polyneuron.io.weight_reader import ReadReport
from polyneuron.planning.budget import Budget
from polyneuron.planning.source import ModelSource
from polyneuron.sizes import show_size


@dataclass(frozen=True, slots=True)
class Mode:
    """The resolved mode of one engine."""

    source: ModelSource
    config: EngineConfig
    budget: Budget
    report: ReadReport
    isa: str
    cores: CoreUse

    def requantised(self) -> dict[str, dict[str, float]]:
        """Error of each tensor whose values are not those of the source."""
        packed = {
            name: {"max_abs": error.max_abs, "relative_rms": error.relative_rms}
            for name, error in self.report.lossy.items()
        }
        stored = {
            tensor.name: {"max_abs": tensor.max_abs_error, "relative_rms": tensor.rms_error}
            for tensor in self.source.manifest.tensors
            if not tensor.is_lossless
        }
        return packed | stored

    def line(self) -> str:
        """One line, before the first token."""
        npu, workers = self.config.num_npu_threads, self.config.num_workers
        on = f" ({self.cores.note})" if self.cores.note else ""
        parts = [
            str(self.budget.mode),
            self._residency(),
            self._npu(npu) if npu else "npu=none",
            f"cpu {workers} {'worker' if workers == 1 else 'workers'}{on}, {self.isa}",
            f"context {self.config.num_ctx}{self._kv_note()}",
        ]
        if lossy := self.requantised():
            worst = max(lossy, key=lambda name: lossy[name]["relative_rms"])
            parts.append(
                f"{len(lossy)} tensors requantised, off by up to "
                f"{lossy[worst]['relative_rms']:.2%} rms ({worst})"
            )
        if not self.report.is_direct:
            reason = "several files" if self.source.is_parted else "no O_DIRECT here"
            parts.append(f"buffered reads ({reason})")
        return "mode: " + " · ".join(parts)

    def _kv_note(self) -> str:
        """What keys and values are stored as, where that loses something."""
        kv_type = self.config.kv_type
        return "" if kv_type is KvType.F16 else f" (keys and values as {kv_type}, lossy)"

    def _npu(self, threads: int) -> str:
        """Who computes prompts, and how precisely where that is not the kernels' own way."""
        spec = parse_npu(self.config.npu)
        if spec.kind is BackendKind.OPENVINO:
            precision = precision_of(spec.device)
            return f"npu=openvino:{spec.device}({threads}t, {precision}, prefill)"
        return f"npu={self.config.npu}({threads}t, modelled, prefill)"

    def _npu_object(self) -> dict[str, Any]:
        spec = parse_npu(self.config.npu)
        is_openvino = spec.kind is BackendKind.OPENVINO
        return {
            "backend": str(spec.kind),
            "device": spec.device or None,
            "precision": precision_of(spec.device) if is_openvino else None,
            "threads": self.config.num_npu_threads,
            "modelled": spec.kind is BackendKind.NATIVE,
        }

    def _residency(self) -> str:
        weights = show_size(self.source.weight_bytes)
        if not self.budget.layout.is_streaming:
            named = self.budget.layout.predictors
            return f"in memory {weights} of weights" + (
                f" · {named.info.kind} predictor" if named else ""
            )
        if self.budget.cold_slots:
            return self._cached(weights)
        return (
            f"{self.budget.num_resident} of {self.budget.num_layers} layers in memory · "
            f"flash {show_size(self.budget.streamed_bytes)}/token of {weights}"
        )

    def _cached(self, weights: str) -> str:
        """Gates in memory, other rows in the neuron cache; of experts what was used lately."""
        budget = self.budget
        cold = show_size(budget.layout.spans["cold"].num_bytes)
        kept = f"gates of {budget.num_resident} of {budget.num_layers} layers in memory"
        what = "their neurons"
        if experts := self.source.spec.experts:
            kept, what = f"{experts.num_used} of {experts.num_experts} experts a token", "experts"
        if predictors := budget.layout.predictors:
            hot = f"{budget.residency.pinned_clusters} hot clusters a layer"
            kept = f"{predictors.info.kind} predictor, {kept if experts else hot}"
            what = "their neurons"
        parts = [
            kept,
            f"neuron cache {cold} ({budget.cached_share:.0%} of {what})",
        ]
        if budget.is_cache_small:
            parts.append("warning: less than one token uses")
        parts.append(f"weights {weights}")
        streamed = f"{show_size(budget.streamed_bytes)}/token and " if budget.streamed_bytes else ""
        parts.append(f"flash {streamed}what a token misses")
        return " · ".join(parts)

    def _predictors(self) -> dict[str, Any] | None:
        """What names neurons; None where nothing does."""
        if (found := self.budget.layout.predictors) is None:
            return None
        return {
            "kind": found.info.kind,
            "input": str(found.info.input),
            "bytes": found.section.num_bytes,
            "hot_clusters": list(self.config.hot_clusters),
            "lookahead": self.config.lookahead,
        }

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "mode": str(self.budget.mode),
            "predictors": self._predictors(),
            "workers": self.config.num_workers,
            "cores": self.cores.as_dict(),
            "npu": self._npu_object(),
            "isa": self.isa,
            "num_ctx": self.config.num_ctx,
            "kv_type": str(self.config.kv_type),
            "kv_bytes": self.budget.layout.spans["kv"].num_bytes,
            "direct_io": self.report.is_direct,
            "requantised": self.requantised(),
            "weight_bytes": self.source.weight_bytes,
            "num_layers": self.budget.num_layers,
            "num_resident_layers": self.budget.num_resident,
            "streamed_bytes_per_token": self.budget.streamed_bytes,
            "neuron_cache_bytes": self.budget.layout.spans["cold"].num_bytes,
            "neuron_cache_share": self.budget.cached_share,
            "prompt_bytes_per_chunk": self.budget.prompt_bytes,
            "warnings": self.budget.warnings(),
        }
