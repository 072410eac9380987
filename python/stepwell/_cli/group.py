"""The list of commands. Each names the module that it lives in, which is imported when it is called
or asked for its help."""

from __future__ import annotations

import importlib
import sys

import click

#: Command → its module, and one line for ``stepwell --help``, which imports none of them.
COMMANDS = {
    "ls": ("listing", "List the steps of a root, or the files of a checkpoint."),
    "show": ("show", "Show the tree of a checkpoint, or the places of its bytes."),
    "cat": ("cat", "Print the value of a leaf, or a slice of it."),
    "diff": ("diff", "Compare two checkpoints."),
    "trace": ("trace", "Compare traces: is a resumed run the same run?"),
    "verify": ("verify", "Read every byte and compare every checksum."),
    "adopt": ("adopt", "Keep checksums for another library's checkpoint."),
    "repair": ("repair", "Rebuild a lost or damaged index from the data files."),
    "plan": ("plan", "Show what a restore would read and do."),
    "cp": ("cp", "Copy a checkpoint to another path or root, and verify the copy."),
    "convert": ("convert", "Write a checkpoint in another format."),
    "export": ("export", "Write a checkpoint for another library, and verify it."),
    "recipe": ("recipe", "List, print and check the maps that come with stepwell."),
    "prune": ("prune", "Apply retention to a root, once."),
    "rm": ("rm", "Delete steps or a branch."),
    "rewind": ("rewind", "Move the steps after STEP into a branch."),
    "gc": ("gc", "Delete leftovers of killed writers, and retired steps."),
    "advise": ("advise", "Advise on the interval of saves, and on what they need."),
    "report": ("report", "Write a report into one HTML file."),
    "doctor": ("doctor", "Try a file system, and show which promises hold there."),
    "info": ("info", "Show versions, and the engine for a path."),
    "completion": ("completion", "Print a script that completes commands in a shell."),
}


class _Commands(click.Group):
    """Commands that are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__package__}.{COMMANDS[cmd_name][0]}")
        found: click.Command = getattr(module, cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
            ctx.fail(f"there is no command {name!r}{meant}")
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import stepwell as sw

        click.echo(f"stepwell {sw.__version__}")
        ctx.exit()


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the version.",
)
def stepwell() -> None:
    """Inspect checkpoints and roots of stepwell, and clean them up.

    A checkpoint is given by its path, or as ROOT@STEP. A root alone means its newest step. Commands
    that only read a checkpoint, and convert and export, also take one of another library.
    Exit codes: 0 success, 1 a finding (damage, a difference, a missing step), 2 wrong usage.
    """


def main() -> None:
    """Runs the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is escaped.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    stepwell(prog_name="stepwell")
