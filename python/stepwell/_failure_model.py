"""The time that a run loses to saves and failures. Times are seconds.

The model: failures are independent, at a constant rate of one in ``mtbf``. A save costs training
``cost``: the call, and the slower steps beside it. It is committed ``latency`` after it began, and
training goes on meanwhile. After a failure the run restarts, which takes ``restart``, and repeats
the work since the start of the last committed save. Failures also end restarts.

The time from one commit to the next has the mean ``M·exp((R + L - C)/M)·(exp(I/M) - 1)``, with the
interval ``I`` from start to start, ``M = mtbf``, ``R = restart``, ``L = latency`` and ``C = cost``.
``I - C`` of it is progress. For ``L = C`` this is the model of J. T. Daly, "A higher order estimate
of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation 13. A longer latency
is a factor: a failure repeats ``L - C`` more.
"""

from __future__ import annotations

import math

#: Exponents of larger numbers are infinite.
_MAX_EXPONENT = 700.0


def young_interval(cost: float, mtbf: float) -> float:
    """Returns the interval of J. W. Young, "A first order approximation to the optimum checkpoint
    interval", CACM 17 (1974): ``sqrt(2·C·M)`` between saves, and the save."""
    return math.sqrt(2 * cost * mtbf) + cost


def daly_interval(cost: float, mtbf: float) -> float:
    """Returns the interval of Daly (2006), equation 37, and the save. Between saves it is
    ``sqrt(2CM)·(1 + sqrt(C/2M)/3 + C/18M) - C``, or ``M`` where ``C >= 2M``."""
    if cost >= 2 * mtbf:
        return mtbf + cost
    half = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(half) / 3 + half / 9)


def best_interval(cost: float, mtbf: float, latency: float = 0.0) -> float:
    """Returns the interval that loses least. One save ends before the next begins, so it is at
    least ``latency``.

    The derivative of the lost time is zero where ``x - 1 + exp(-(x + C/M)) = 0`` for the work
    ``x·M`` between saves. This is ``x = 1 + W(-exp(-1 - C/M))`` with Lambert's W. Neither restart
    nor latency has a part in it. Newton's method finds the root from above, as the function is
    convex.
    """
    relative = cost / mtbf
    x = min(1.0, math.sqrt(2 * relative))
    while x > 0:
        change = (x + math.expm1(-(x + relative))) / -math.expm1(-(x + relative))
        if not change > 1e-12 * x:
            break
        x -= change
    return max(x * mtbf + cost, latency)


def lost_share(
    interval: float, cost: float, mtbf: float, latency: float = 0.0, restart: float = 0.0
) -> float:
    """Returns the share of a run's time that is no progress, from 0 to 1."""
    exponent = (interval + restart + max(latency - cost, 0.0)) / mtbf
    if exponent > _MAX_EXPONENT or interval <= cost:
        return 1.0
    mean = mtbf * math.exp(exponent) * -math.expm1(-interval / mtbf)
    return 1 - (interval - cost) / mean
