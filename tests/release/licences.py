"""Writes the licences of all Rust packages in the extension: ``licences.py WORKSPACE FILE``. The
texts are those of each package's own sources."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

TARGET = "x86_64-unknown-linux-gnu"
_TEXTS = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|UNLICENSE|COPYRIGHT).*", re.IGNORECASE)


def packages(workspace: Path) -> list[dict[str, str]]:
    """The packages of others that the extension is linked with."""
    command = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={TARGET}"]
    found = json.loads(subprocess.run(command, cwd=workspace, check=True, capture_output=True).stdout)
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    wanted = [next(one["id"] for one in found["packages"] if one["name"] == "stepwell-python")]
    for id in wanted:
        for dependency in nodes[id]["deps"]:
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_linked and dependency["pkg"] not in wanted:
                wanted.append(dependency["pkg"])
    linked = [one for one in found["packages"] if one["id"] in wanted and one["source"] is not None]
    return sorted(linked, key=lambda one: (one["name"], one["version"]))


def main() -> None:
    workspace, file = map(Path, sys.argv[1:])
    names, users = [], dict[str, list[str]]()
    for one in packages(workspace):
        names.append(f"{one['name']} {one['version']}: {one['license']}")
        folder = Path(one["manifest_path"]).parent
        texts = [text for text in sorted(folder.iterdir()) if text.is_file() and _TEXTS.fullmatch(text.name)]
        if not texts:
            sys.exit(f"{names[-1]}: {folder} has no text of its licence")
        for text in texts:
            users.setdefault(text.read_text(errors="replace").strip(), []).append(one["name"])
    head = "The extension of stepwell contains these packages. Their licences follow.\n"
    bodies = [f"{'=' * 80}\n{', '.join(some)}\n\n{text}\n" for text, some in users.items()]
    file.write_text("\n".join([head, *names, "", *bodies]))


if __name__ == "__main__":
    main()
