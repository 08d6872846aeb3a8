"""`synth` killed anywhere: run again it goes on, and both files have the bytes they always have."""

import hashlib
import signal
from pathlib import Path

import pytest

from polyneuron.io import ncf_pieces
from polyneuron.io.piece_writer import journal_path, partial_path
from polyneuron.synth import twin
from tests.faults.killing import MAX_EVENTS, in_child, kill_at
from tests.support.synthetic import small_settings, write_synth
from tests.support.tiny_ncf import cut_small

NAMES = ("synth.ncf", "synth.gguf")
PIECE_BYTES = 10_000
TINY = {"num_layers": 1, "d_ff": 96, "vocab_size": 288, "d_model": 64, "num_heads": 2}


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The sums of undisturbed files, written in some fifteen pieces each."""
    cut_small(monkeypatch)
    for module, name in ((ncf_pieces, "READ_BYTES"), (twin, "PIECE_BYTES")):
        monkeypatch.setattr(module, name, PIECE_BYTES)
    (tmp_path / "whole").mkdir()
    write_synth(tmp_path / "whole", small_settings(**TINY))
    return digests(tmp_path / "whole")


def digests(folder: Path) -> dict[str, str]:
    """Of the files that are complete."""
    paths = [folder / name for name in NAMES if (folder / name).exists()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("torn", [False, True], ids=["before", "torn"])
def test_killed_anywhere_gives_same_bytes(
    torn: bool, expected: dict[str, str], tmp_path: Path
) -> None:
    settings, resumed = small_settings(**TINY), []
    for event in range(1, MAX_EVENTS):
        folder = tmp_path / str(event)
        folder.mkdir()

        def body(event: int = event, folder: Path = folder) -> None:
            kill_at(event, torn=torn)
            write_synth(folder, settings)

        status = in_child(body)
        assert status in (0, signal.SIGKILL)
        assert digests(folder).items() <= expected.items()
        reports = write_synth(folder, settings)
        assert digests(folder) == expected
        resumed += [report.resumed_bytes for report in reports if not report.was_there]
        for name in NAMES:
            assert not partial_path(folder / name).exists()
            assert not journal_path(folder / name).exists()
        if status == 0:
            break
    assert status == 0
    assert event > 40
    assert sum(num_bytes > 0 for num_bytes in resumed) > event // 3
