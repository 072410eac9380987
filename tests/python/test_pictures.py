"""The pictures of the documentation that scripts draw are those of the present sources."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.append(str(PROJECT / "docs" / "pictures"))

import house  # noqa: E402
import terminal  # noqa: E402


def test_the_house_is_drawn_as_its_script_says() -> None:
    assert house.PICTURE.read_text() == house.picture()


def test_the_modules_in_the_house_exist() -> None:
    for storey in house.STOREYS:
        folder = PROJECT / storey.folder
        for module in storey.modules + storey.ground if storey.folder else ():
            for name in module.names.split(", "):
                found = [folder / name, *folder.glob(f"{name}.rs"), *folder.glob(f"{name}.py")]
                assert any(one.exists() for one in found), f"{folder}: {name}"


def test_storeys_depend_on_lower_ones_only() -> None:
    crates = [storey.folder.split("/")[0] for storey in house.STOREYS if storey.style in ("b1", "b2")]
    for number, crate in enumerate(crates):
        manifest = (PROJECT / crate / "Cargo.toml").read_text()
        needed = re.findall(r"^stepwell-(\w+)\.workspace", manifest, re.MULTILINE)
        assert sorted(needed) == sorted(crates[number + 1 :])


def test_the_terminal_shows_what_the_commands_print() -> None:
    drawn, now = (terminal.steady(one) for one in (terminal.PICTURE.read_text(), terminal.picture()))
    assert drawn == now
