"""The manifest of a step, as ``Checkpoint.manifest`` returns it: see ``docs/format.md``."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from ._types import Json


class ManifestName(TypedDict):
    """A top-level entry of the state."""

    name: str
    #: Its place among all entries.
    position: int


class ManifestIndex(TypedDict):
    """The index file of an item."""

    path: str
    length: int
    crc32c: str


class ManifestItem(TypedDict):
    """An item of the step."""

    name: str
    dir: str
    index: ManifestIndex
    top_level: list[ManifestName]
    leaves: int
    tensor_bytes: int


class ManifestFile(TypedDict):
    """A data file of the step."""

    path: str
    length: int
    trailer_crc32c: str
    file_id: str


class ManifestDropped(TypedDict):
    """An item that was thinned away, and when."""

    item: str
    unix_ns: int


class ManifestUnsupported(TypedDict):
    """A leaf that could not be stored, and was left out."""

    path: str
    reason: str


class ManifestChecksums(TypedDict):
    """The file with the checksums of an adopted checkpoint."""

    #: Absolute, or relative to the root.
    path: str
    length: int
    crc32c: str


class ManifestAdopted(TypedDict):
    """The files of another library that have the bytes of a step."""

    #: The checkpoint: absolute, or relative to the root.
    path: str
    #: True if it is read as a step of the root above it.
    of_root: bool
    family: str
    bytes: int
    checksums: ManifestChecksums


class Manifest(TypedDict):
    """The commit record of a step. Times are nanoseconds since 1970, sizes are bytes."""

    format_version: int
    required_features: list[str]
    writer: str
    step: int
    started_unix_ns: int
    committed_unix_ns: int
    world_size: int
    plan_hash: str
    items: list[ManifestItem]
    files: list[ManifestFile]
    #: Only of a step that was adopted.
    adopted: NotRequired[ManifestAdopted]
    dropped: list[ManifestDropped]
    #: Only of a step without some leaves.
    unsupported: NotRequired[list[ManifestUnsupported]]
    metrics: dict[str, float]
    custom_metadata: Json
