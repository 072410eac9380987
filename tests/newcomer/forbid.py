"""Forbids this process system calls by seccomp, as the default profiles of containers do. Needs no
privilege; holds for threads and children that come later, and cannot be undone."""

from __future__ import annotations

import ctypes
import errno
import struct

#: The same numbers on every architecture that has them: setup, enter, register.
IO_URING = (425, 426, 427)

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
# BPF_LD | BPF_W | BPF_ABS: the number of the call is the first word of the filter's input.
_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_ALLOW = 0x7FFF_0000
_FAIL_WITH = 0x0005_0000


def io_uring() -> None:
    """From here on every call of io_uring answers EPERM."""
    system_calls(IO_URING, errno.EPERM)


def system_calls(numbers: tuple[int, ...], answer: int) -> None:
    """From here on these answer with that errno."""
    program = struct.pack("HBBI", _LOAD_WORD, 0, 0, 0)
    for place, number in enumerate(numbers):
        # Equal: over the rest of the comparisons and the first return; else: on.
        program += struct.pack("HBBI", _JUMP_IF_EQUAL, len(numbers) - place, 0, number)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    program += struct.pack("HBBI", _RETURN, 0, 0, _FAIL_WITH | answer)
    code = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "seccomp cannot be used here")
