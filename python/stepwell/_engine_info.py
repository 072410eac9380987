"""``sw.engine_info``: the I/O engine of a path, and versions."""

from __future__ import annotations

from typing import Any

from . import _core
from ._locations import Location, location
from ._public import public


@public
def engine_info(path: Location | None = None, *, cuda: bool = False) -> dict[str, Any]:  # mixed
    """Returns the I/O engine for ``path`` (default: the working directory), the reasons for it, and
    versions. With ``cuda``, the entry ``"cuda"`` has the CUDA driver and its devices, or the reason
    why there are none. This initialises CUDA in this process, and its forked children cannot use
    CUDA."""
    import platform

    import ml_dtypes
    import numpy as np

    engine, direct, alignment, registered, reasons = _core.engine_choice(
        location("." if path is None else path)
    )
    found = {
        "engine": engine,
        "direct": direct,
        "alignment": alignment,
        "registered": registered,
        "reasons": reasons,
        "stepwell": _core.VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "kernel": platform.release(),
    }
    if cuda:
        driver, why_not = _core.cuda()
        found["cuda"] = why_not if driver is None else {"driver": driver[0], "devices": driver[1]}
    return found
