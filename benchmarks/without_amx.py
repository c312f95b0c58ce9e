"""Runs a command as on a processor of the generation before AMX: the kernel refuses every process
of it the use of tiles.

    python -m benchmarks.without_amx python -m benchmarks.compare ...

Programs ask the kernel before they use AMX (`arch_prctl`, ARCH_REQ_XCOMP_PERM) and fall back to
AVX-512 where it says no: this holds for Quire and every peer alike, by the same means, and says
nothing of what any of them would choose. Owns a filter of system calls (seccomp), which all
descendants inherit and none can take off. Linux on x86-64 alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

from quire.errors import QuireError

_ARCH_PRCTL, _REQUEST_PERMISSION = 158, 0x1023
_X86_64 = 0xC000003E
_NR_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Where the kernel puts a call's number, its architecture and its first
argument (`struct seccomp_data`)."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_amx() -> None:
    """Have the kernel refuse AMX to this process and all that it starts.
    Raises QuireError where it cannot."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise QuireError(
            f"AMX can be refused on Linux and x86-64 alone, and this is {platform.system()} "
            f"on {platform.machine()}."
        )
    instructions = b"".join(
        struct.pack("<HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, _ARCH_AT),
            (_JUMP_IF_EQUAL, 0, 5, _X86_64),
            (_LOAD, 0, 0, _NR_AT),
            (_JUMP_IF_EQUAL, 0, 3, _ARCH_PRCTL),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (_JUMP_IF_EQUAL, 0, 1, _REQUEST_PERMISSION),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions) // 8, instructions)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise QuireError(
            f"The kernel takes no filter of system calls: {os.strerror(ctypes.get_errno())}."
        )


def main() -> None:
    command = sys.argv[1:]
    if not command:
        raise SystemExit("usage: python -m benchmarks.without_amx COMMAND [ARGUMENT ...]")
    try:
        refuse_amx()
        os.execvp(command[0], command)
    except QuireError as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        raise SystemExit(f"{command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
