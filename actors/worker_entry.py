"""What the raylet starts for an actor: it asks the nursery for a process and ends.

Run by path in an isolated interpreter, so that it imports next to nothing.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import platform
import signal
import socket
import sys

MAX_REQUEST_BYTES = 1 << 20
NUM_STREAMS = 3
DONE = b"+"

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4  # else old kernels slow every load after a store
_ENOSYS = 38
_TIMER_SLACK_NS = 50_000_000

# machine: (audit architecture, number of seccomp, number of timerfd_create)
_SYSCALLS = {
    "x86_64": (0xC000003E, 317, 283),
    "aarch64": (0xC00000B7, 277, 85),
    "riscv64": (0xC00000F3, 277, 85),
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def _refuse_timer_descriptors(libc: ctypes.CDLL) -> None:
    """Make timerfd_create fail in this process, so that timer slack applies to Ray's main loop.

    The main loop of an actor looks for signals every 10 ms, even when idle: about 1 % of a core
    each. Its event library waits by a timer descriptor, which knows no slack; without one it waits
    by the time-out of epoll_wait, which does. Messages still wake it at once.
    """
    known = _SYSCALLS.get(platform.machine())
    if known is None or sys.byteorder != "little":
        return
    audit_arch, seccomp_number, timerfd_number = known
    load, equal, answer = 0x20, 0x15, 0x06
    code = (_Instruction * 6)(
        _Instruction(load, 0, 0, 4),  # seccomp_data.arch
        _Instruction(equal, 0, 3, audit_arch),
        _Instruction(load, 0, 0, 0),  # seccomp_data.nr
        _Instruction(equal, 0, 1, timerfd_number),
        _Instruction(answer, 0, 0, 0x00050000 | _ENOSYS),
        _Instruction(answer, 0, 0, 0x7FFF0000),
    )
    program = _Program(len(code), code)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(
        ctypes.c_long(seccomp_number),
        ctypes.c_long(_SECCOMP_SET_MODE_FILTER),
        ctypes.c_long(_SECCOMP_FILTER_FLAG_SPEC_ALLOW),
        ctypes.byref(program),
    )


def die_with_parent(libc: ctypes.CDLL) -> None:
    """Have the kernel end this process when its parent ends, even if frozen or in a long C call."""
    parent = os.getppid()
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


def prepare(libc: ctypes.CDLL) -> None:
    """Let timers of this process and of those it forks fire late enough to be few."""
    _refuse_timer_descriptors(libc)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)


def _ask_nursery(path: str) -> bool:
    """Have the nursery fork the actor with our arguments; False if it cannot be reached."""
    request = json.dumps(
        {
            "arguments": sys.argv[1:],
            "environment": dict(os.environ),
            "directory": os.getcwd(),
        }
    ).encode()
    streams = array.array("i", range(NUM_STREAMS))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
            nursery.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
            nursery.connect(path)
            nursery.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            return nursery.recv(1) == DONE
    except OSError:
        return False


def main() -> None:
    """Hand over to the nursery, or else become Ray's worker here."""
    if _ask_nursery(os.environ["POLYNEURON_RAY_NURSERY"]):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    die_with_parent(libc)
    prepare(libc)  # both stay in force in the program that follows
    os.execv(sys.executable, [sys.executable, os.environ["POLYNEURON_RAY_WORKER"], *sys.argv[1:]])


if __name__ == "__main__":
    main()
