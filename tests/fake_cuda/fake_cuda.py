"""The fake CUDA driver (see libcuda.c) for tests in Python: real tensors of torch in fake device
memory.

``load()`` builds and loads it before stepwell looks for a driver. Tensors come in by DLPack, so
torch holds them like any CUDA tensor. Kernels and calls of CUDA's runtime fail, because there is no
device. The functions here read and change values, on streams of the driver.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_HERE = Path(__file__).parent
_CUDA = 2


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

#: Descriptions that torch may still delete, by address.
_alive: dict[int, Any] = {}


class FakeCuda:
    """The driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fakecuda_calls.restype = ctypes.c_long
        library.fakecuda_pending.restype = ctypes.c_long
        library.fakecuda_violations.restype = ctypes.c_size_t
        self._check("cuInit", 0)
        self._updated: list[Any] = []
        self._streams: dict[int, list[int]] = {}

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        assert code == 0, f"{name} answers {code}"

    @contextmanager
    def _within(self, device: int) -> Iterator[None]:
        context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(context))

    def stream(self, device: int = 0) -> int:
        """A new stream's handle."""
        handle = ctypes.c_void_p()
        with self._within(device):
            self._check("cuStreamCreateWithPriority", ctypes.byref(handle), 1, 0)
        assert handle.value is not None
        return handle.value

    def current_stream(self, device: Any = 0) -> Any:
        """As ``torch.cuda.current_stream``: one for each device."""
        number = device if isinstance(device, int) else device.index
        if number not in self._streams:
            self._streams[number] = [self.stream(number)]
        return SimpleNamespace(cuda_stream=self._streams[number][-1])

    def allocate(self, nbytes: int, device: int = 0) -> int:
        """Memory on a device; its address, which the host cannot touch."""
        address = ctypes.c_uint64()
        with self._within(device):
            self._check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def tensor(
        self,
        values: np.ndarray[Any, Any],
        device: int = 0,
        strides: tuple[int, ...] | None = None,
        at: int | None = None,
    ) -> Any:
        """A tensor of torch on a device, with these values; freed when torch lets go of it, unless
        it is part of another one's memory."""
        import torch

        values = np.asarray(values)
        address = self.allocate(values.nbytes, device) if at is None else at
        self.poke(address, values)
        codes = {"i": 0, "u": 1, "f": 2}
        shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        steps = (
            [one // values.itemsize for one in np.empty(values.shape, values.dtype).strides]
            if strides is None
            else strides
        )
        own = (ctypes.c_int64 * values.ndim)(*steps)
        managed = _Managed()
        managed.tensor = _Tensor(
            address,
            _Device(_CUDA, device),
            values.ndim,
            _DataType(codes[values.dtype.kind], 8 * values.itemsize, 1),
            shape,
            own,
            0,
        )

        def delete(pointer: Any) -> None:
            if at is None:
                self._library.cuMemFree_v2(ctypes.c_uint64(address))
            _alive.pop(ctypes.addressof(pointer.contents), None)

        managed.deleter = _Deleter(delete)
        _alive[ctypes.addressof(managed)] = (managed, shape, own)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return torch.utils.dlpack.from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))

    def poke(self, address: int, values: np.ndarray[Any, Any]) -> None:
        """Puts values into device memory, now and past all streams."""
        own = np.ascontiguousarray(values)
        self._library.fakecuda_poke(
            ctypes.c_uint64(address), own.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(own.nbytes)
        )

    def values(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Returns the current values of a contiguous tensor, outside of all streams."""
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        out = np.empty(tuple(tensor.shape), dtype)
        self._library.fakecuda_peek(
            ctypes.c_uint64(tensor.data_ptr()),
            out.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(out.nbytes),
        )
        return out

    def update(self, tensor: Any, version: int, stream: int | None = None) -> None:
        """Puts an update on the current stream (or another): bytes of the pattern of that
        version."""
        handle = self.current_stream(tensor.device).cuda_stream if stream is None else stream
        nbytes = tensor.numel() * tensor.element_size()
        self._check(
            "fakecuda_update",
            ctypes.c_void_p(handle),
            ctypes.c_uint64(tensor.data_ptr()),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint64(version),
        )
        # Its memory is not to be freed before that.
        self._updated.append(tensor.untyped_storage())

    def pattern(self, like: Any, version: int) -> np.ndarray[Any, Any]:
        """The values of a tensor like this after that update."""
        dtype = np.dtype(str(like.dtype).removeprefix("torch."))
        out = np.empty(tuple(like.shape), dtype)
        self._library.fakecuda_pattern(
            out.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint64(0),
            ctypes.c_size_t(out.nbytes),
            ctypes.c_uint64(version),
        )
        return out

    def synchronize(self, device: int = 0) -> None:
        """Waits for the current stream."""
        self._check("cuStreamSynchronize", ctypes.c_void_p(self.current_stream(device).cuda_stream))

    def random(self, seed: int, delay_us: int) -> None:
        """Order and delays from here on."""
        self._library.fakecuda_random(ctypes.c_uint64(seed), ctypes.c_long(delay_us))

    def stall(self, on: bool) -> None:
        """Nothing runs any more, or it does again."""
        self._library.fakecuda_stall(int(on))

    def fail(self, name: str, nth: int = 0, code: int = 719, how: int = 0) -> None:
        """The n-th call from now on fails: once (0), always (1), with all others (2)."""
        self._library.fakecuda_fail(name.encode(), ctypes.c_long(nth), code, how)

    def capturing(self, on: bool, device: int = 0) -> None:
        """A graph is captured on the current stream, or no more."""
        self._library.fakecuda_capturing(ctypes.c_void_p(self.current_stream(device).cuda_stream), int(on))

    def heal(self) -> None:
        """No failure is left, nor one to come."""
        self._library.fakecuda_heal()

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return int(self._library.fakecuda_calls(name.encode()))

    def violations(self) -> list[str]:
        """Runs everything, and returns and clears the violations."""
        deadline = time.monotonic() + 60
        while self._library.fakecuda_pending():
            assert time.monotonic() < deadline, "the devices do not come to an end"
            time.sleep(1e-3)
        self._updated.clear()
        out = ctypes.create_string_buffer(1 << 16)
        self._library.fakecuda_violations(out, ctypes.c_size_t(len(out)))
        return out.value.decode().splitlines()


def load(into: Path) -> FakeCuda:
    """Builds the driver and loads it under the name that everybody looks for."""
    subprocess.run([_HERE / "build.sh", into], check=True)
    return FakeCuda(ctypes.CDLL(str(into / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL))
