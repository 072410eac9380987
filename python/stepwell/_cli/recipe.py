"""``stepwell recipe``: the maps that come with this package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import click

import stepwell as sw

from .command import command
from .output import FINE, PROBLEMS, Output, columns, count, fields_of, safe
from .targets import TARGET, Target, map_of, with_numbers

#: The name of one of several files.
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$", re.ASCII)
#: Names that are shown of a list.
_SHOWN = 8


@click.group("recipe")
def recipe() -> None:
    """List, print and check recipes: the maps that come with stepwell.

    Pass the name of a recipe as --map of another command. With the two families swapped, it is the
    way back: hf-llama-to-megatron and megatron-to-hf-llama.
    """


@command("list", of="recipe")
def recipe_list(out: Output) -> int:
    """List the recipes, each with the parameters that a config.json or --param gives."""
    rows = [(name, sw.maps.recipe(name)) for name in sw.maps.recipes()]
    out.document(
        {
            "recipes": [
                {
                    "name": name,
                    "about": one.about,
                    "warning": one.warning,
                    "parameters": list(one.parameters),
                }
                for name, one in rows
            ]
        }
    )
    out.lines(columns([(name, one.about) for name, one in rows], "ll"))
    for name, one in rows:
        if one.warning:
            out.line(f"{out.bad('warning')}: {name}: {one.warning}")
    return FINE


@command("show", of="recipe")
@click.argument("name")
def recipe_show(out: Output, name: str) -> int:
    """Print the TOML of the recipe NAME, or of a part of recipes, to be copied and changed."""
    text = sw.maps.recipe_toml(name)
    out.document({"name": name, "toml": text})
    out.line(text.rstrip("\n"))
    return FINE


@command("check", of="recipe")
@click.argument("name", metavar="RECIPE")
@click.argument("path", type=TARGET)
@with_numbers
def recipe_check(
    out: Output, name: str, path: Target, inverse: bool, config: str | None, param: tuple[str, ...]
) -> int:
    """Show what of the checkpoint PATH (or ROOT@STEP) the recipe RECIPE does not cover, and what
    the recipe wants that is not there. Reads no array.

    RECIPE is the name of a recipe, or a TOML file. Exits with 1 if something does not fit.
    """
    chosen = map_of(name, inverse, config, param)
    found = chosen.check(path.path, path.step)
    out.document({"fits": bool(found), "warning": chosen.warning, **fields_of(found)})
    out.lines(_lines(out, found, path.path))
    if chosen.warning:
        out.line(f"{out.bad('warning')}: {safe(chosen.warning)}")
    return FINE if found else PROBLEMS


def _lines(out: Output, found: sw.maps.Coverage, path: str) -> Iterator[str]:
    yield from _listed(out.bad("not covered: "), found.uncovered)
    yield from _listed(out.bad("not there: "), found.missing)
    yield from _listed(out.bad("does not fit: "), found.problems)
    yield from _listed("other leaves, which keep their names: ", found.others)
    verdict = out.good("it fits") if found else out.bad("it does not fit")
    yield f"{verdict}; {count(found.covered, 'leaf', 'leaves')} covered"
    if found:
        return
    if _SHARD.search(path):
        yield "this file has a part of a checkpoint: pass the directory of all parts"
    elif found.uncovered or found.missing:
        yield "use the recipe of this model, or change a copy of this one: `stepwell recipe show`"


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    """A line for each name, of the first ones."""
    for name in names[:_SHOWN]:
        yield what + safe(name)
    if len(names) > _SHOWN:
        yield f"{what}{len(names) - _SHOWN} more (--json lists all)"


for _part in (recipe_list, recipe_show, recipe_check):
    recipe.add_command(_part)
