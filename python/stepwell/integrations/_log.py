"""Log lines of the integrations."""

from .. import _lifecycle as lifecycle

INFO, WARNING = 20, 30


def log(level: int, text: str) -> None:
    """Logs a line to ``logging.getLogger("stepwell.integrations")``."""
    lifecycle.log(level, "stepwell.integrations", text)
