"""What a simulator must know of a model file, and of the engine that would run it."""

from __future__ import annotations

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import predictor_path
from polyneuron.planning.bundles import neuron_rows
from polyneuron.planning.source import ModelSource, open_source
from polyneuron.planning.work import EMBEDDING, HEAD, ModelWork, model_work
from polyneuron.scenarios.counted_activity import counted_activity
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.engine_plan import EnginePlan
from polyneuron.scenarios.model_file import model_path
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.recording import stated_activity
from polyneuron.scenarios.replay_model import POLICIES
from polyneuron.scenarios.script import Script


def modelled(script: Script, device: DeviceModel) -> tuple[ModelShape, EnginePlan | None]:
    """The model of a script; of a file on this machine also the plan that a replay would run.

    ConfigError names file and key.
    """
    path, where = model_path(script), script.where("model")
    if path is None:
        return ModelShape.from_table(script.model, where, stated_activity(script)), None
    if device.profile is not None and script.engine.policy in POLICIES:
        own = EnginePlan.of_script(script, path, device.profile)
        is_predicted = own.mode is FeedForwardMode.PREDICTED
        return file_shape(own.source, where, is_predicted=is_predicted), own
    is_predicted = predictor_path(path).exists()
    return file_shape(open_source(path), where, is_predicted=is_predicted), None


def file_shape(source: ModelSource, where: str, *, is_predicted: bool) -> ModelShape:
    """Sizes of a file, and how its neurons are active; ConfigError for what is not simulated."""
    spec, work = source.spec, model_work(source)
    if spec.experts:
        raise ConfigError(
            f"{where}.file: {source.path} is a mixture of experts, which is simulated by its sizes "
            f"only; give shape = … in place of file"
        )
    tensors = {tensor.name: tensor for tensor in source.manifest.tensors}
    is_tied = HEAD not in tensors
    matrices = 2 if not spec.has_gate else 3
    return ModelShape(
        name=source.path.stem, layers=spec.num_layers, hidden=spec.d_model, neurons=spec.d_ff,
        experts=1, experts_used=1, matrices=matrices, scales=0,
        **_neuron_bytes(source, work, matrices),
        attention=sum(matrix.num_bytes for matrix in work.attention),
        embedding=0 if is_tied else tensors[EMBEDDING].num_bytes, head=work.head.num_bytes,
        predictors=source.predictors().section.num_bytes if is_predicted else 0, resident=0,
        kv_token=work.kv_bytes * spec.num_layers,
        activity=counted_activity(source, is_predicted=is_predicted),
    )  # fmt: skip


def _neuron_bytes(source: ModelSource, work: ModelWork, matrices: int) -> dict[str, int]:
    """What one neuron is in memory and in the file."""
    if source.manifest.layout is not Layout.BUNDLES:
        whole = sum(matrix.num_bytes for matrix in work.feed_forward) // source.spec.d_ff
        return {
            "row": whole // matrices, "slot": whole, "bundle": whole, "first_read": whole,
            "second_read": 0,
        }  # fmt: skip
    rows = neuron_rows(source.manifest)
    assert work.rows is not None
    weights = work.rows.decide_row + work.rows.up_row + work.rows.down_row
    return {
        "row": weights // matrices, "slot": rows.whole().slot_bytes, "bundle": rows.bundle_bytes,
        "first_read": rows.read_begin or rows.slot_bytes,
        "second_read": rows.slot_bytes if rows.read_begin else 0,
    }  # fmt: skip
