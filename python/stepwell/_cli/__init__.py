"""The command line: ``stepwell``, also ``python -m stepwell``.

It uses the public API of the package only. One module holds one command; :mod:`.group` lists the
commands, :mod:`.command` is what they have in common, :mod:`.output` what they print. Nothing else
of the package imports this. A module is imported when its command is called.
"""

from .group import main

__all__ = ["main"]
