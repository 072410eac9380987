"""A disk whose writes and flushes fail when they are told to: the script of an nbdkit server, which
runs in that server and imports nothing of the tests.

``nbdkit python failing_disk.py image=FILE orders=FILE``. The orders are one line, read again
whenever the file has changed:

* ``well``: everything succeeds
* ``write N`` / ``flush N``: the N-th write or flush from here on fails, and none after it
* ``writes N`` / ``flushes N``: that one and all of its kind after it, until there are other orders
* ``all N``: from the N-th write or flush on everything fails, reads too

A failed request is not written. A line for each is appended to the file of orders with the suffix
``.failed``.
"""

from __future__ import annotations

import errno
import os
import threading

import nbdkit

API_VERSION = 2

lock = threading.Lock()
parameters: dict[str, str] = {}
state = {"version": 0, "order": "well", "left": 0, "broken": False}


def config(key: str, value: str) -> None:
    parameters[key] = os.path.abspath(value)


def thread_model() -> int:
    return nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS


def open(readonly: bool) -> int:
    return os.open(parameters["image"], os.O_RDWR)


def close(disk: int) -> None:
    os.close(disk)


def get_size(disk: int) -> int:
    return os.fstat(disk).st_size


def can_flush(disk: int) -> bool:
    return True


def can_fua(disk: int) -> int:
    return nbdkit.FUA_EMULATE


def read_orders() -> None:
    version = os.stat(parameters["orders"]).st_mtime_ns
    if version == state["version"]:
        return
    with os.fdopen(os.open(parameters["orders"], os.O_RDONLY)) as file:
        words = file.read().split()
    state.update(version=version, order=words[0], left=int(words[1]) if words[1:] else 0, broken=False)


def fails(kind: str) -> bool:
    """True if the orders want this one to fail."""
    with lock:
        read_orders()
        order = state["order"]
        if order in (kind, kind + "s", kind + "es") or (order == "all" and kind != "read"):
            state["left"] -= 1
            if state["left"] == 0 or (state["left"] < 0 and order != kind):
                state["broken"] = order == "all"
                return True
        return bool(state["broken"])


def fail(kind: str, count: int, offset: int) -> None:
    failed = os.open(parameters["orders"] + ".failed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(failed, f"{kind} {count} {offset}\n".encode())
    os.close(failed)
    nbdkit.set_error(errno.EIO)
    raise OSError(errno.EIO, f"{kind} fails as ordered")


def pread(disk: int, buffer: bytearray, offset: int, flags: int) -> None:
    if fails("read"):
        fail("read", len(buffer), offset)
    buffer[:] = os.pread(disk, len(buffer), offset)


def pwrite(disk: int, buffer: bytes, offset: int, flags: int) -> None:
    if fails("write"):
        fail("write", len(buffer), offset)
    os.pwrite(disk, buffer, offset)


def flush(disk: int, flags: int) -> None:
    if fails("flush"):
        fail("flush", 0, 0)
    os.fsync(disk)
