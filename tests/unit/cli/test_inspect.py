"""`inspect` on files that can be run and on ones that cannot."""

import json
from pathlib import Path

import pytest

from polyneuron.cli.inspect import inspect, inspect_file
from polyneuron.errors import ConfigError, FormatError
from polyneuron.model.spec import RopeScaling
from tests.support.raw_gguf import RawGguf, tensor
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf


def test_json_describes_model_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyModel(family="qwen2", tensor_type="Q5_1", rope_scaling=RopeScaling.YARN)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", model)
    inspect(str(path), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "qwen2"
    assert found["problem"] is None
    assert found["file_bytes"] == path.stat().st_size
    assert found["hyper_parameters"]["d_ff"] == 96
    assert found["hyper_parameters"]["rope"]["scaling"] == "yarn"
    assert found["tokenizer"]["pre"] == "smollm"
    assert found["tokenizer"]["num_tokens"] == 299
    rows = {row["name"]: row for row in found["tensors"]}
    down = rows["blk.1.ffn_down.weight"]
    assert (down["type"], down["storage"], down["is_lossless"]) == ("Q5_1", "q8", False)
    assert down["shape"] == [64, 96]
    assert down["file_bytes"] == 64 * 3 * 24
    assert down["stored_bytes"] == 64 * 3 * 34
    assert rows["blk.0.attn_q.bias"]["storage"] == "f32"
    assert found["stored_bytes"] == sum(row["stored_bytes"] for row in rows.values())


def test_keys_and_values_of_a_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By type; heads that fill no blocks of 32 have f16 only."""
    wide = write_tiny_gguf(tmp_path / "wide.gguf", TinyModel(head_dim=32, num_kv_heads=2))
    inspect(str(wide), as_json=True)
    found = json.loads(capsys.readouterr().out)
    layers = found["hyper_parameters"]["num_layers"]
    assert found["kv_position_bytes"] == {
        "f16": 256 * layers,
        "q8": 136 * layers,
        "q4": 72 * layers,
    }
    inspect(str(wide))
    assert "as f16, " in capsys.readouterr().out
    odd = write_tiny_gguf(tmp_path / "odd.gguf", TinyModel(head_dim=16))
    inspect(str(odd), as_json=True)
    assert list(json.loads(capsys.readouterr().out)["kv_position_bytes"]) == ["f16"]


def test_table_shows_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(tensor_type="Q4_0"))
    inspect(str(path), as_json=False)
    out = capsys.readouterr().out
    for row in inspect_file(path).tensors:
        assert row.name in out
    assert "interleaved" in out
    assert "cannot be run" not in out


def test_departures_from_llama_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(family="gemma2", logit_cap=30.0))
    inspect(str(path), as_json=False)
    told = "has_post_norms True, window 12, window_period 2, logit_cap 30, embedding_scale 8"
    assert told in capsys.readouterr().out
    inspect(str(path), as_json=True)
    block = json.loads(capsys.readouterr().out)["hyper_parameters"]["block"]
    assert (block["window"], block["residual"]) == (12, "sequential")


def test_unsupported_type_is_listed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "iq.gguf"
    raw = RawGguf(tensors=[tensor("w\x1b[31m", (256, 1), type_id=23), tensor("v", (32,), 99, 160)])
    path.write_bytes(raw.build())
    inspect(str(path), as_json=False)
    out = capsys.readouterr().out
    assert "IQ4_XS" in out
    assert "not supported" in out
    assert "type 99" in out
    assert "cannot be run:" in out
    assert "\x1b" not in out
    inspect(str(path), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["hyper_parameters"] is None
    assert "IQ4_XS" in found["problem"]
    assert found["stored_bytes"] is None


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(FormatError, match="HTML"):
        inspect(str(tmp_path / "page.gguf"), as_json=True)
    with pytest.raises(ConfigError, match="no such file"):
        inspect(str(tmp_path / "absent.gguf"), as_json=True)
