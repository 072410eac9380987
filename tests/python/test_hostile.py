"""Hostile checkpoints, whose checksums hold: whatever is asked of one, the answer is a typed error
(or a value), in bounded time and memory, and nothing is read outside the step.
``tests/hostile/make.py`` makes them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = Path(__file__).resolve().parents[1] / "hostile"
sys.path.insert(0, str(HOSTILE))
import make  # noqa: E402

#: Its address space is bounded: what Python, numpy and the engine take, and some.
READER = """
import resource, signal, sys
from pathlib import Path
import stepwell as sw
sys.path.insert(0, sys.argv[1])
import make
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

def ask(path):
    for what in (sw.metadata, sw.restore, sw.verify):
        signal.alarm(20)
        try:
            answer = what(path)
            yield what.__name__, "value" if getattr(answer, "ok", True) else "damage", str(getattr(answer, "damages", ""))
        except sw.StepwellError as error:
            yield what.__name__, type(error).__name__, str(error)
        finally:
            signal.alarm(0)
"""


def reader(script: str, *arguments: object, wrap: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrap, sys.executable, "-c", READER + script, str(HOSTILE), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[str, str]]]:
    """Returns a reader's answers: by case and question, the kind of the answer and its message."""
    root = tmp_path_factory.mktemp("hostile")
    left = {}
    for name in make.CASES:
        directory = root / name.replace("/", "-")
        directory.mkdir()
        try:
            left[name] = make.make(name, directory)
        except PermissionError:  # a device needs rights that not everybody has
            shutil.rmtree(directory)
    ran = reader(
        "for path in sys.argv[2:]:\n    for answer in ask(path): print(path, *answer, sep='\\t')",
        *left.values(),
    )
    assert ran.returncode == 0, ran.stderr
    answers: dict[str, dict[str, tuple[str, str]]] = {name: {} for name in left}
    names = {str(path): name for name, path in left.items()}
    for line in ran.stdout.splitlines():
        path, question, kind, words = line.split("\t", 3)
        answers[names[path]][question] = (kind, words)
    return answers


@pytest.mark.parametrize("name", make.CASES)
def test_a_hostile_checkpoint_gets_a_typed_error(
    asked: dict[str, dict[str, tuple[str, str]]], name: str
) -> None:
    if name not in asked:
        pytest.skip("this user may not make it")
    words = make.CASES[name][1]
    answers = asked[name]
    assert list(answers) == ["metadata", "restore", "verify"]
    if name.startswith(".lease"):  # what guards a step from being removed is no part of it
        assert {kind for kind, _ in answers.values()} == {"value"}
        return
    if not name.startswith(("data/", "i0/00000.data")):
        assert answers["metadata"][0] not in ("value", "damage")
    assert answers["restore"][0] in ("FormatError", "CorruptCheckpoint", "StorageError", "NotAStep")
    assert answers["verify"][0] != "value"
    assert re.search(words, answers["restore"][1]), answers["restore"][1]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    "name", [name for name in make.CASES if name.startswith("paths/") or "/link" in name]
)
def test_nothing_outside_the_step_is_opened(tmp_path: Path, name: str) -> None:
    path = make.make(name, tmp_path)
    log = tmp_path / "log"
    calls = "open,openat,openat2,readlink,readlinkat,unlink,unlinkat,rename,renameat2"
    wrap = ("strace", "-f", "-qq", "-e", f"trace={calls}", "-o", str(log))
    ran = reader("for answer in ask(sys.argv[2]): pass", path, wrap=wrap)
    assert ran.returncode == 0, ran.stderr
    trace = log.read_text()
    assert str(path) in trace
    for line in trace.splitlines():
        if re.search(r"= \d", line):
            assert "/outside" not in line, line
            assert "/etc/hostname" not in line, line
            assert "/dev/zero" not in line, line


@pytest.mark.parametrize("item", [0, 1])
def test_every_word_of_an_index_may_lie(tmp_path: Path, item: int) -> None:
    """Its checksums hold, and each word in turn says something else: typed errors or other values,
    and neither a crash nor memory for what is merely claimed."""
    make.sound(tmp_path / "step")
    script = """
from collections import Counter
path, item = Path(sys.argv[2]), int(sys.argv[3])
original = {file: file.read_bytes() for file in (path / "manifest.json", path / f"i{item}" / "index")}
said = Counter()
for number, (where, index) in enumerate(make.index_words(path, item)):
    if number % 5 != 2:
        continue
    make.seal_index(path, item, index)
    try:
        for question, kind, words in ask(path):
            said[kind] += 1
    except BaseException as error:
        print("RAW", where, question if said else "", type(error).__name__, error)
    for file, content in original.items():
        file.unlink()
        file.write_bytes(content)
print(dict(said))
"""
    ran = reader(script, tmp_path / "step", item)
    assert ran.returncode == 0, ran.stderr
    assert "RAW" not in ran.stdout, ran.stdout
    assert "CorruptCheckpoint" in ran.stdout, ran.stdout
