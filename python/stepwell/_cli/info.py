"""``stepwell info``: versions, the engine for a path and why, and facts about the machine."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata

import click

import stepwell as sw

from .command import command
from .locations import location
from .output import FINE, Output, columns, safe, size

_LIBRARIES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "flax", "optax", "megatron-core", "mpi4py")


@command("info")
@click.argument("path", default=".")
@click.option("--cuda", is_flag=True, help="Also ask the CUDA driver for its devices.")
def info(out: Output, path: str, cuda: bool) -> int:
    """Show what a bug report needs: versions, the engine for PATH (default: the working directory)
    and the reasons, and facts about this machine.
    """
    engine = sw.engine_info(path, cuda=cuda)
    versions = {name: engine.pop(name) for name in ("stepwell", "python", "kernel")}
    for name in _LIBRARIES:
        engine.pop(name, None)
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = {
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "memlock_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    where = location(path)
    settings = {name: value for name, value in os.environ.items() if name.startswith("STEPWELL_")}
    out.document(
        {
            "versions": versions,
            "executable": sys.executable,
            "path": where,
            "engine": engine,
            "machine": machine,
            "environment": settings,
        }
    )
    shown: dict[str, object] = {**versions, "executable": sys.executable, "path": where}
    shown |= {name: value for name, value in engine.items() if name != "reasons"}
    shown |= {**machine, "memory_bytes": size(memory)}
    shown["memlock_bytes"] = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    rows = [(name.removesuffix("_bytes").replace("_", " "), safe(value)) for name, value in shown.items()]
    out.lines(columns([*rows, *settings.items()], "ll"))
    out.lines(f"because: {safe(reason)}" for reason in engine["reasons"])
    return FINE
