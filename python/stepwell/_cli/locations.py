"""Paths and URLs of object stores, for commands. No other module here reads the package's own."""

from __future__ import annotations

from .._core import stored_names
from .._locations import is_directory, is_root, is_store, location
from .._store import StoreUrl, is_store_url

__all__ = ["StoreUrl", "is_directory", "is_root", "is_store", "is_store_url", "location", "stored_names"]
