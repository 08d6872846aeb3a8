"""`perplexity`: what it refuses, and its JSON."""

import io
import json
import sys
from pathlib import Path

import pytest

from polyneuron.cli.perplexity import as_object, perplexity, read_text
from polyneuron.errors import ConfigError
from polyneuron.measure.perplexity import Perplexity


@pytest.mark.parametrize("chunks", [0, -2])
def test_bad_number_of_chunks_is_refused(chunks: int) -> None:
    with pytest.raises(ConfigError, match=rf"--chunks {chunks}:"):
        perplexity("smollm2", "text.txt", chunks=chunks)


def test_missing_text_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(ConfigError, match=r"-f .*missing\.txt: No such file"):
        perplexity("smollm2", str(missing))


def test_text_comes_from_stdin_with_bad_bytes_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb")))
    assert read_text("-") == "a\ufffdb"


def test_json_has_null_where_nothing_can_be_told() -> None:
    total = Perplexity()
    total.add([-1e6])
    assert json.loads(json.dumps(as_object(total))) == {
        "ppl": None, "stderr": None, "chunks": 1, "tokens": 1,
    }  # fmt: skip
