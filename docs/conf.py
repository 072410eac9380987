"""How Sphinx makes the site (``make docs``): pages stay markdown, the reference is made from the
docstrings of the package."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "python"))

import stepwell  # noqa: E402

# The whole package, so that what a signature names is found where it is defined.
for _module in pkgutil.iter_modules(stepwell.__path__):
    if _module.name not in ("__main__", "torch"):
        importlib.import_module(f"stepwell.{_module.name}")

project = "stepwell"
author = "the authors of stepwell"
copyright = "the authors of stepwell, Apache-2.0"
version = release = stepwell.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static", "examples"]
nitpicky = True
# Types of others have pages elsewhere, and nothing is fetched while this is built. Names that are
# private here are shown, and lead nowhere.
nitpick_ignore_regex = [
    ("py:.*", r"(collections\.abc|concurrent\.futures|contextlib|os|datetime|types|numpy|torch|jax)\..*"),
    (
        "py:.*",
        r"Best|(coordinators\.)?Coordinator|DeviceMesh|Events|Files|Globs|MapLike|OnEvent|Optimizer"
        r"|Location|Path|ProcessGroup|Progress|Survives|Target|Unsupported|_[A-Z]\w*",
    ),
    ("py:.*", r"stepwell\.(\w+\.)*(_\w*|[A-Z])"),
    ("py:.*", r"stepwell\._types\.Array|stepwell\.coordinators\.Board"),
]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
# Functions that take objects of other libraries can be documented without these.
_LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "lightning",
    "torchtitan",
    "keras",
    "ignite",
    "ray",
    "axolotl",
)
os.environ["KERAS_BACKEND"] = "torch"
autodoc_mock_imports = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]

html_theme = "furo"
html_title = "stepwell"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options: dict[str, Any] = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}


def _docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sections of docstrings (Args, Returns, Raises) as Sphinx has them, and the kind of each
    error, which is no docstring's business to repeat.

    The comments of attributes and data are prose: as an extension, napoleon would take what stands
    before a colon for a type.
    """
    if what not in ("attribute", "data"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, obj, options).lines()
    if what == "exception" and issubclass(obj, stepwell.StepwellError):
        lines += ["", f"``kind``: ``{obj.kind}``"]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _docstring)
