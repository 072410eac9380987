"""Writers of other libraries' formats.

A writer plans the files of a conversion: literal bytes, whole tensors, and checksums. The engine
writes them. A writer opens no file and imports no library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from . import safetensors
from .content import Content, FileOptions
from .output import OutputFile

__all__ = ["WRITERS", "Content", "FileOptions", "Writer"]

#: Plans the files that hold a content.
Writer: TypeAlias = Callable[[Content, FileOptions], list[OutputFile]]

#: The writers by the name of their format.
WRITERS: Mapping[str, Writer] = {"safetensors": safetensors.plan}
