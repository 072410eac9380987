"""The text of a map, from a file or a pipe."""

from __future__ import annotations

import os
import select
import stat
import time
from typing import NoReturn

from ..errors import MisuseError
from ..formats.files import read

#: The longest text of a map.
_MAX_BYTES = 16 << 20
#: The timeout of a pipe, in seconds.
_PIPE_TIMEOUT = 30.0


def text(path: str) -> bytes:
    """All bytes of a map's file or pipe."""
    if os.path.isfile(path):
        length = read(path, 0, 0)[1]
        return read(path, 0, length)[0] if length <= _MAX_BYTES else _too_long(path)
    if not os.path.exists(path) or not stat.S_ISFIFO(os.stat(path).st_mode):
        raise MisuseError(f"the map {path} is no file; pass a TOML file, rules or a sw.maps.Map")
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _until_end(pipe, path)
    finally:
        os.close(pipe)


def _until_end(pipe: int, path: str) -> bytes:
    deadline = time.monotonic() + _PIPE_TIMEOUT
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    found = b""
    while len(found) <= _MAX_BYTES:
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise MisuseError(
                f"the map {path} is a pipe without an end after {_PIPE_TIMEOUT:g} s; use a file"
            )
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        found += part
    else:
        _too_long(path)
    if not found:
        raise MisuseError(f"the map {path} is an empty pipe, and a pipe can be read once only; use a file")
    return found


def _too_long(path: str) -> NoReturn:
    raise MisuseError(f"the map {path} is too long; a map has at most {_MAX_BYTES} bytes")
