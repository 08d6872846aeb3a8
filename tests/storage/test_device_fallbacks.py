"""Where the kernel forbids io_uring or the file system direct reads: other ways, the same bytes.

A seccomp filter in a process of its own makes the kernel refuse, as container runtimes do.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

IO_URING_SETUP = 425  # the same on every architecture
OPENAT = {"x86_64": 257, "aarch64": 56}
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ, JMP|JSET, RET
NUMBER, THIRD_ARGUMENT = 0, 32  # offsets in struct seccomp_data

READER = """
import ctypes, os, sys
from pathlib import Path
from polyneuron.io.file_device import open_device
program = ctypes.create_string_buffer(bytes.fromhex(sys.argv[1]))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
rules = Filter((len(program) - 1) // 8, ctypes.addressof(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
if libc.prctl(22, 2, ctypes.byref(rules), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    sys.exit(os.strerror(ctypes.get_errno()))
content = Path(sys.argv[2]).read_bytes()
with open_device(Path(sys.argv[2]), capacity=len(content)) as device:
    assert bytes(device.read(0, len(content))) == content
    assert bytes(device.read(777, 1000)) == content[777:1777]
    info = device.info()
    print(info.backend.name, info.uring_status, info.is_direct)
"""


def rule(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def read_under(rules: list[bytes], path: Path) -> list[str]:
    """What a device is in a process under these rules, after reading the file right."""
    command = [sys.executable, "-c", READER, b"".join(rules).hex(), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Invalid argument" in result.stderr and "Traceback" not in result.stderr:
        pytest.skip("the kernel has no seccomp filters")
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(os.urandom(3_000_001))
    return path


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_threads_read_where_uring_is_forbidden(path: Path, code: int) -> None:
    rules = [
        rule(LOAD, 0, 0, NUMBER),
        rule(EQUAL, 0, 1, IO_URING_SETUP),
        rule(RETURN, 0, 0, REFUSE | code),
        rule(RETURN, 0, 0, ALLOW),
    ]
    assert read_under(rules, path)[:2] == ["POOL", str(-code)]


def test_page_cache_serves_where_direct_is_refused(path: Path) -> None:
    openat = OPENAT.get(platform.machine())
    if openat is None:
        pytest.skip(f"number of openat on {platform.machine()} not known here")
    rules = [
        rule(LOAD, 0, 0, NUMBER),
        rule(EQUAL, 0, 3, openat),
        rule(LOAD, 0, 0, THIRD_ARGUMENT),
        rule(ANY_BIT, 0, 1, os.O_DIRECT),
        rule(RETURN, 0, 0, REFUSE | errno.EINVAL),
        rule(RETURN, 0, 0, ALLOW),
    ]
    assert read_under(rules, path)[2] == "False"
