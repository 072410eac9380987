"""Files of ``torch.save``: the nesting of the state, with tensors and plain Python values.

``torch.load(weights_only=True)`` reads them. Tied tensors share one storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..description import row_major
from .archive import Archive
from .content import Content, FileOptions, Namespace, PlainValue
from .output import OutputFile, OutputTensor, check_dtypes
from .pickling import Pickle, Unpicklable

#: The first part of all names in the archive.
_ROOT = "archive"
#: The storage classes of dtypes that have one.
_STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
#: Dtypes without one, by the names that torch gives them.
_UNTYPED = {
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "complex32": "complex32",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans one file."""
    check_torch_dtypes(content.tensors)
    file = OutputFile(options.name)
    holders = {tensor.name: content.ties.get(tensor.name, tensor.name) for tensor in content.every}
    add_archive(file, content.state, content.tensors, holders)
    return [file]


def check_torch_dtypes(tensors: Sequence[OutputTensor]) -> None:
    """Refuses dtypes that are not written for torch."""
    check_dtypes(
        tensors,
        {**_STORAGES, **_UNTYPED}.__contains__,
        "a conversion to torch or DCP cannot write",
        "Leave them out",
    )


def add_archive(
    file: OutputFile, state: object, tensors: Sequence[OutputTensor], holders: Mapping[str, str]
) -> None:
    """Adds the archive of a state to a file. ``holders`` has the names of the tensors with the
    bytes, by the names of all tensors."""
    storages = {tensor.name: str(number) for number, tensor in enumerate(tensors)}

    def add(out: Pickle, value: object) -> bool:
        if isinstance(value, OutputTensor):
            _add_tensor(out, value, storages[holders[value.name]])
            return True
        if isinstance(value, PlainValue):
            out.add(plain(value.value))
            return True
        if isinstance(value, Namespace):
            out.new("argparse", "Namespace")
            out.add(value.attributes)
            out.build()
            return True
        return False

    pickle = Pickle(add)
    pickle.add(state)
    archive = Archive(file)
    archive.add(f"{_ROOT}/data.pkl", pickle.finish())
    archive.add(f"{_ROOT}/byteorder", b"little")
    for tensor in tensors:
        archive.add(f"{_ROOT}/data/{storages[tensor.name]}", b"", tensor)
    archive.add(f"{_ROOT}/version", b"3\n")
    archive.finish()


def add_dtype(out: Pickle, dtype: str) -> None:
    """Writes a dtype of torch. Its names are those of numpy."""
    out.symbol("torch", _UNTYPED.get(dtype, dtype))


def is_plain(value: object) -> bool:
    """True if a file can hold a value."""
    try:
        Pickle(lambda *_: False).add(plain(value))
    except Unpicklable:
        return False
    return True


def plain(value: object) -> object:
    """A value, and Python's number for a scalar of numpy."""
    return value.item() if isinstance(value, np.generic) else value


def _add_tensor(out: Pickle, tensor: OutputTensor, key: str) -> None:
    """Writes a tensor as a call of the function that torch rebuilds it with."""
    storage = _STORAGES.get(tensor.dtype)
    count = tensor.nbytes // tensor.itemsize
    out.symbol("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
    out.mark()
    out.mark()
    out.add("storage")
    if storage:
        out.symbol("torch", storage)
    else:
        out.symbol("torch.storage", "UntypedStorage")
    for value in (key, "cpu", count if storage else tensor.nbytes):
        out.add(value)
    out.tuple()
    out.persistent()
    for part in (0, tensor.shape, row_major(tensor.shape, 1), False):
        out.add(part)
    out.empty_ordered_dict()
    if not storage:
        add_dtype(out, tensor.dtype)
    out.tuple()
    out.call()
