"""``stepwell completion``: a script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .command import command
from .output import FINE, Output


@command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(out: Output, shell: str) -> int:
    """Print the script that completes commands and options in SHELL.

    Add to ~/.bashrc or ~/.zshrc: eval "$(stepwell completion bash)", with the name of your shell.
    For fish: stepwell completion fish | source.
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"click completes nothing in {shell}")
    group = click.get_current_context().find_root().command
    script = found(group, {}, "stepwell", "_STEPWELL_COMPLETE").source()
    out.document({"shell": shell, "script": script})
    out.line(script)
    return FINE
