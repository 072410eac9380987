"""The HTML report as one file: markup, style, script and data, and a policy that lets nothing else
run.

Data cannot become markup. It is inside an element that is never executed, with ``<``, ``>`` and
``&`` escaped, and the script inserts it as text. If either fails, the page's policy still runs only
the one script whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from string import Template

#: Parts of the script, in their order: they share one scope.
_SCRIPTS = ("base.js", "grid.js", "treemap.js", "files.js", "leaves.js", "steps.js", "advice.js", "main.js")


#: The end of the title of every page.
_TITLE_END = ": stepwell"
#: The most bytes in front of the style of a page. Escapes make a name up to six times longer.
MAX_HEAD_BYTES = 8192


def page(name: str, data: dict[str, object]) -> str:
    """The whole page about what has that name."""
    style = _asset("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(map(_asset, _SCRIPTS)) + "})();\n"
    return Template(_asset("page.html")).substitute(
        TITLE=html.escape(name + _TITLE_END),
        STYLE=style,
        STYLE_HASH=_digest(style),
        SCRIPT=script,
        SCRIPT_HASH=_digest(script),
        DATA=embedded(data),
    )


def is_page(start: bytes) -> bool:
    """True if a file with these first bytes begins as a page does: with its title and its style."""
    head, style, _ = start.partition(b"<style>")
    return head.startswith(b"<!doctype html>") and f"{_TITLE_END}</title>".encode() in head and bool(style)


def embedded(data: object) -> str:
    """JSON that stays inside its element, whatever its texts are."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """As a content security policy names what may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
