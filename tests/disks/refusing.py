"""A seccomp filter that answers some system calls with an errno, as containers, sandboxes and old
kernels do."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable, Iterable

#: By their numbers, which are not the same on every machine.
X86_64 = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "renameat2": 316, "fallocate": 285, "openat2": 437,
    "statx": 332, "copy_file_range": 326, "sync_file_range": 277, "memfd_create": 319, "fadvise64": 221, "cachestat": 451,
    "sched_getaffinity": 204, "madvise": 28,
}  # fmt: skip

LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
OF_X86_64 = 0xC000003E
NUMBER, MACHINE = 0, 4
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


def missing() -> str | None:
    """Why calls cannot be refused here."""
    if platform.machine() != "x86_64":
        return f"system calls are known by their numbers on x86_64, not on {platform.machine()}"
    return None


def refusing(calls: Iterable[str], answer: str) -> Callable[[], None]:
    """For ``preexec_fn``: from there on these calls have that answer."""
    numbers = [X86_64[call] for call in calls]

    def instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    program = instruction(LOAD, MACHINE)
    program += instruction(JUMP_EQUAL, OF_X86_64, 1, 0) + instruction(RETURN, ALLOW)
    program += instruction(LOAD, NUMBER)
    for at, number in enumerate(numbers):
        program += instruction(JUMP_EQUAL, number, len(numbers) - at, 0)
    program += instruction(RETURN, ALLOW) + instruction(RETURN, ERRNO | getattr(errno, answer))
    instructions = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    )
    libc = ctypes.CDLL(None, use_errno=True)

    def install() -> None:
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
            PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0
        ):
            raise OSError(ctypes.get_errno(), "no seccomp filter")
        # The two buffers live as long as this function does.
        assert instructions is not None

    return install
