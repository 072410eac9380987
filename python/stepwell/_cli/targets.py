"""The arguments of commands: a checkpoint (``PATH`` or ``ROOT@STEP``), or a root."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import click

import stepwell as sw

from ..errors import CorruptCheckpoint, MisuseError, StepNotFound, StepwellError
from .locations import is_root

_Function = TypeVar("_Function", bound=Callable[..., object])

#: The most digits of a parameter.
_MAX_DIGITS = 19


@final
@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint as it was named."""

    path: str
    #: The step of a root; ``None``: the newest.
    step: int | None = None

    def __str__(self) -> str:
        return self.path if self.step is None else f"{self.path}@{self.step}"

    def open(self, map: sw.maps.MapLike | None = None) -> sw.Checkpoint:
        """Opens it for reading, under a lease; with the names and shapes of a map."""
        return sw.open(self.path, self.step, map=map)


class _TargetType(click.ParamType["Target"]):
    """``PATH`` or ``ROOT@STEP``. An existing path with an ``@`` in it is a path."""

    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        given = str(value)
        root, at, step = given.rpartition("@")
        if not (at and root) or os.path.lexists(given):
            return Target(given)
        if not (step.isascii() and step.isdigit()):
            if os.path.isdir(root):
                self.fail(f"{given}: {step!r} is no step number; write {root}@STEP", param, ctx)
            return Target(given)
        return Target(root, int(step))


TARGET = _TargetType()


def with_numbers(function: _Function) -> _Function:
    """Gives a command the options of :func:`map_of`, beside its name."""
    for option in (
        click.option(
            "--param", multiple=True, metavar="NAME=N", help="A number of the map's model. Repeatable."
        ),
        click.option(
            "--config", metavar="PATH", help="The config.json that has the numbers of the map's model."
        ),
        click.option("--inverse", is_flag=True, help="Use the way back of the map."),
    ):
        function = option(function)
    return function


def map_of(name: str, inverse: bool, config: str | None, param: Sequence[str]) -> sw.maps.Map:
    """The map of a recipe's name or of a TOML file, with the numbers of its model."""
    found = sw.maps.recipe(name, inverse=inverse, config=config)
    numbers: dict[str, int] = {}
    for one in param:
        key, _, number = one.partition("=")
        if not (number.isascii() and number.isdigit()) or len(number) > _MAX_DIGITS:
            raise click.UsageError(f"--param takes NAME=N, such as heads=32, not {one!r}")
        if key not in found.parameters:
            known = ", ".join(found.parameters) or "none"
            raise click.UsageError(f"--param: {name} has no parameter {key!r}; it has {known}")
        if numbers.setdefault(key, int(number)) != int(number):
            raise click.UsageError(f"--param gives {key} two values, {numbers[key]} and {number}")
    return found.with_parameters(None, **numbers)


def mapped(help: str) -> Callable[[_Function], _Function]:
    """Gives a command the options of a map. Its parameter ``map`` is the map, or ``None``."""

    def made(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(
            *given: object,
            map: str | None,
            inverse: bool,
            config: str | None,
            param: tuple[str, ...],
            **options: object,
        ) -> object:
            if map is None and (inverse or config or param):
                raise click.UsageError("--inverse, --config and --param are for a map: pass --map too")
            chosen = None if map is None else map_of(map, inverse, config, param)
            return function(*given, map=chosen, **options)

        text = f"{help} MAP is a TOML file, or the name of a recipe."
        option = click.option("--map", metavar="MAP", help=text)
        return option(with_numbers(run))  # type: ignore[return-value]

    return made


#: For a command that opens one checkpoint.
MAPPED = mapped("Give the leaves the names and shapes of this map.")


def format_of(checkpoint: sw.Checkpoint) -> str:
    """The format of an open checkpoint."""
    facts = checkpoint.metadata()
    return "stepwell" if facts.format_version else facts.writer


def manager_of(
    root: str,
    retention: sw.Retention | None = None,
    *,
    read_only: bool = True,
    grace: float | None = None,
) -> sw.CheckpointManager:
    """Opens a manager of an existing root: one that only reads, or its writer. Refuses a directory
    that is no root, because a writer would make it one."""
    options = sw.Options(create=False) if grace is None else sw.Options(create=False, grace=grace)
    manager = sw.CheckpointManager(root, read_only=True, coordinator=None, options=options)
    path = manager.root
    if not (is_root(path) or manager.all_steps()):
        manager.close()
        try:
            with sw.open(path) as checkpoint:
                found = format_of(checkpoint)
        except StepwellError as error:
            # It says what the path is instead.
            raise StepNotFound(f"{path} is no root of a run: {error}") from error
        raise MisuseError(
            f"{path} is of another library ({found}) and has no steps of stepwell. Pass the root of a run. "
            "`ls`, `show`, `verify`, `convert` and `export` read this one"
        )
    if read_only and retention is None:
        return manager
    manager.close()
    return sw.CheckpointManager(
        path, retention=retention, read_only=read_only, coordinator=None, options=options
    )


def root_of(path: str) -> list[sw.results.StepInfo] | None:
    """Returns the steps of a root; ``None`` if a path is a single checkpoint or nothing."""
    try:
        with manager_of(path) as manager:
            return manager.inspect()
    except (StepwellError, OSError):
        return None


def root_of_another(path: str) -> sw.results.Root | None:
    """Returns the root of another library; ``None`` if a path is none."""
    try:
        found = sw.open_root(path)
    except (StepNotFound, MisuseError):
        return None
    return None if found.family == "stepwell" else found


def info_of(steps: list[sw.results.StepInfo], step: int) -> sw.results.StepInfo:
    """Returns the facts about a step that is whole."""
    found = next((one for one in steps if one.step == step), None)
    if found is None:
        raise StepNotFound(f"there is no step {step}; `stepwell ls` lists the steps")
    if found.damage is not None:
        raise CorruptCheckpoint(f"step {step} is damaged: {found.damage}")
    return found
