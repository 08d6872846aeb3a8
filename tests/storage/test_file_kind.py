"""Files that are not GGUFs are named for what they are, in one line, fast and small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyneuron.errors import FormatError
from polyneuron.io.file_kind import PROFILE_MAGIC, TRACE_MAGIC, beside
from polyneuron.io.gguf_file import read_header

PICKLE = b"\x80\x02}q\x00."
SAFETENSORS = (64).to_bytes(8, "little") + b'{"weight":{"dtype":"F32"' + bytes(60)
KINDS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"empty \(0 bytes\)"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
    "html_lower": (b"<html lang=en>", "HTML page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive"),
    "pickle": (PICKLE, "Python pickle"),
    "safetensors": (SAFETENSORS, "safetensors"),
    "ggml": (b"lmgg" + bytes(60), "from before GGUF"),
    "ggjt": (b"tjgg" + bytes(60), "from before GGUF"),
    "powerinfer": (b"PWRI" + bytes(60), "PowerInfer"),
    "reversed_magic": (b"FUGG" + bytes(60), "byte order is reversed"),
    "short_magic": (b"GG", "cut off inside the magic"),
    "json": (b'{"error": "not found"}', "JSON text"),
    "profile": (PROFILE_MAGIC + bytes(60), "a model's profile; give the model"),
    "recording": (TRACE_MAGIC + bytes(60), "recorded activations; a scenario plays them"),
    "zeros": (bytes(4096), r"starts with b'\\x00"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_recognised(tmp_path: Path, kind: str) -> None:
    content, expected = KINDS[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=expected) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"No such file or directory; give the path"):
        read_header(tmp_path / "absent.gguf")


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a directory; give the path of a \.gguf file"):
        read_header(tmp_path)


def test_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


def test_nul_in_path_is_refused() -> None:
    with pytest.raises(FormatError, match="null"):
        read_header("a\0b")


def test_refusal_of_a_large_file_is_small(tmp_path: Path) -> None:
    """8 GiB of zeros behind a hostile header: only the header is touched."""
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + (3).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little"))
        file.truncate(8 << 30)
    script = (
        "import resource, sys, time\n"
        "from polyneuron.errors import FormatError\n"
        "from polyneuron.io.gguf_file import read_header\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    read_header(sys.argv[1])\n"
        "except FormatError as error:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) * 1024 < 50 << 20


def test_what_lies_beside_a_model() -> None:
    assert beside(Path("a/m.ncf"), ".profile") == Path("a/m.profile")
    assert beside(Path("llama-3.q4"), ".profile") == Path("llama-3.q4.profile")
    assert beside(Path("llama-3.q8"), ".profile") == Path("llama-3.q8.profile")
