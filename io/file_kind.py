"""Says by its first bytes what a file is."""

import os
import stat
from pathlib import Path

from polyneuron.errors import FormatError, UnsupportedError

GGUF_MAGIC = b"GGUF"
PWRI_MAGIC = b"PWRI"
"""Of PowerInfer's GGUFs: the same container, with predictors and down matrices turned."""
NCF_MAGIC = b"\x89NCF\r\n\x1a\n"
"""Of neuron-cluster files: a transfer that alters line ends or the eighth bit damages it."""
PROFILE_MAGIC = b"\x89PNP\r\n\x1a\n"
TRACE_MAGIC = b"\x89PNA\r\n\x1a\n"
"""Of recorded activations."""
HEAD_BYTES = 64

_PICKLE_CURE = "save it as safetensors and give the folder, or give a GGUF"
_OLD = "an old GGML file, from before GGUF; give a GGUF of the same model"
_PLAIN = (
    (b"PK\x03\x04", f"a zip archive (a PyTorch checkpoint?); {_PICKLE_CURE}"),
    (b"lmgg", _OLD),
    (b"fmgg", _OLD),
    (b"tjgg", _OLD),
    (b"algg", "an old GGML LoRA adapter; merge it into its base"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program (a llamafile?); give the GGUF that is in it"),
    (b"{", "JSON text; of a Hugging Face folder give the folder"),
    (NCF_MAGIC, "a neuron-cluster file already"),
    (PROFILE_MAGIC, "a model's profile; give the model that lies beside it"),
    (TRACE_MAGIC, "recorded activations; a scenario plays them: [activity] trace"),
)


def check_regular_file(path: Path, cure: str = "give the path of a .gguf file") -> None:
    """FormatError, which ends with the cure, unless `path` is a regular file that is not empty."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FormatError(f"{path}: {reason}; {cure}") from None
    if stat.S_ISDIR(status.st_mode):
        raise FormatError(f"{path}: a directory; {cure}")
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file; {cure}")
    if status.st_size == 0:
        raise FormatError(f"{path}: empty (0 bytes); fetch the file again")


def beside(model: Path, suffix: str) -> Path:
    """A file of another kind beside a model: in place of `.ncf`, else behind the whole name."""
    return model.with_suffix(suffix) if model.suffix == ".ncf" else Path(f"{model}{suffix}")


def is_ncf(path: Path) -> bool:
    """Whether a file begins as a neuron-cluster file does."""
    try:
        with path.open("rb") as file:
            return file.read(len(NCF_MAGIC)) == NCF_MAGIC
    except OSError:
        return False


def check_gguf_magic(path: Path, head: bytes, magics: tuple[bytes, ...] = (GGUF_MAGIC,)) -> None:
    """FormatError saying what the file looks like, unless `head` starts as one of `magics`."""
    if head.startswith(magics):
        return
    if head.startswith(PWRI_MAGIC):
        raise UnsupportedError(
            f"{path}: a PowerInfer GGUF (PWRI), which this version cannot read as a model; its "
            "predictors can be taken with polyneuron profile --import"
        )
    raise FormatError(f"{path}: not a GGUF: {_describe(head)}")


def _describe(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "an HTML page (a login or error page saved in place of the model?); fetch it again"
    if text.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer; run `git lfs pull` to fetch the model itself"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "safetensors; give the folder it came in, with config.json and tokenizer.json"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"a Python pickle (a PyTorch checkpoint?); {_PICKLE_CURE}"
    for prefix, meaning in _PLAIN:
        if head.startswith(prefix):
            return meaning
    if GGUF_MAGIC.startswith(head) or head.startswith(b"FUGG"):
        return "cut off inside the magic" if len(head) < 4 else "its byte order is reversed"
    return f"it starts with {head[:8]!r}"
