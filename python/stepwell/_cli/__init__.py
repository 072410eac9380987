"""The command line: ``stepwell``, also ``python -m stepwell``.

One module per command family; :mod:`.command` is what all commands have in common, :mod:`.output`
what they print, :mod:`.group` the list of them. Nothing else of the package imports this, and a
module of it is imported when its command is called: ``stepwell ls`` should not wait for what draws
a report.
"""

from .group import main

__all__ = ["main"]
