"""Kinds of errors: the engine's names and the package's classes are in step; and what an error says
to do."""

from __future__ import annotations

import errno
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
from stepwell import _core, errors

SOURCES = Path(__file__).parents[2]


#: Every kind: part of the public interface.
KINDS = {
    "cancelled", "closed", "coordination_timeout", "corrupt_checkpoint", "device", "donated_buffer",
    "durability_uncertain", "forked_process", "format", "internal", "invalid", "io", "load_failed", "locked",
    "mismatch", "no_locks", "not_a_step", "not_carried", "rank_failed", "read_only", "resume_differs", "save_failed", "session_lost",
    "step_exists", "step_gone",
    "step_not_found", "step_order", "timeout", "torn_snapshot", "unreachable", "unsupported_leaf",
}  # fmt: skip


def test_the_engines_table_of_kinds_is_stable() -> None:
    kinds = _core.error_kinds()
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_class_and_a_line_in_the_reference(kind: str) -> None:
    cls = errors.BY_KIND[kind]
    assert cls.__doc__
    assert type(errors.from_engine(kind, "it failed", {})) is cls
    lines = (SOURCES / "docs" / "reference" / "errors.md").read_text().splitlines()
    names = {f".. autoexception:: {cls.__name__}", f".. autoexception:: stepwell.errors.{cls.__name__}"}
    assert len(names & set(lines)) == 1


def test_the_module_lists_its_classes() -> None:
    classes = [cls for cls in errors._classes() if getattr(errors, cls.__name__, None) is cls]
    assert errors.__all__ == sorted(cls.__name__ for cls in classes)


#: Calls, keywords and values of Python in a message: ``hold()``, ``include=``, ``None``.
_PYTHON = re.compile(r"\b[a-z_]+\(\)|\b[a-z_]+=(?![\d{=])|\b(?:None|True|False)\b|\bsw\.")
#: Sources whose messages may have such words, and why.
_EXCEPTIONS = {
    "core/src/foreign/npy.rs",  # the header of .npy files is a literal of Python
    "manager/src/step_name.rs",  # a pattern as the manifest has it
    "reshard/src/matching/report.rs",  # the keywords that allow a difference
}


def test_messages_of_the_engine_have_no_words_of_python() -> None:
    found = []
    for crate in ("core", "manager", "reshard"):
        for source in sorted((SOURCES / crate / "src").rglob("*.rs")):
            name = str(source.relative_to(SOURCES))
            if name in _EXCEPTIONS or re.search(r"test|simulated", name):
                continue
            code = source.read_text().split("#[cfg(test)]\nmod tests {")[0]
            for line in code.splitlines():
                texts = [] if line.strip().startswith("//") else re.findall(r'"((?:[^"\\]|\\.)*)"', line)
                found += [(name, one) for one in texts if " " in one and _PYTHON.search(one)]
    assert not found


def test_every_class_but_the_base_has_a_kind_of_the_table() -> None:
    assert set(errors.BY_KIND) == KINDS | {sw.StepwellError.kind}


def test_an_internal_error_says_that_it_is_a_bug() -> None:
    error = errors.from_engine("internal", "this is a bug", {"expected": "3", "found": "4"})
    assert isinstance(error, sw.errors.InternalError)
    assert not isinstance(error, (ValueError, OSError))
    assert (error.expected, error.found) == ("3", "4")


def test_no_two_classes_share_a_kind() -> None:
    # Other modules may have subclasses for themselves.
    classes = [cls for cls in errors._classes() if cls.__module__ in ("stepwell", "stepwell.errors")]
    assert len({cls.kind for cls in classes}) == len(classes)
    assert all(errors.BY_KIND[cls.kind] is cls for cls in classes)


def test_the_classes_are_what_their_callers_expect() -> None:
    expected = {
        sw.StepExists: FileExistsError, sw.StepNotFound: FileNotFoundError, sw.UnsupportedLeaf: TypeError,
        sw.SaveFailed: OSError, sw.errors.CoordinationTimeout: TimeoutError,
    }  # fmt: skip
    for cls, base in expected.items():
        assert issubclass(cls, base)
        assert issubclass(cls, sw.StepwellError)


def test_an_error_keeps_its_message_and_the_systems_number() -> None:
    error = errors.from_engine("save_failed", "saving step 3 failed", {"errno": 5, "file": "/x"})
    assert isinstance(error, OSError)
    assert (str(error), error.errno, error.filename, error.kind) == (
        "saving step 3 failed",
        5,
        "/x",
        "save_failed",
    )


@pytest.mark.parametrize("code", errors.REMEDIES)
def test_a_disk_error_says_what_to_do(code: int) -> None:
    for kind, remedies in (("save_failed", errors.SAVE_REMEDIES), ("io", errors.REMEDIES)):
        said = str(errors.from_engine(kind, "it failed", {"errno": code}))
        assert said == f"it failed; {remedies[code]}"
    # A step that was not found has its own remedy.
    assert str(errors.from_engine("step_not_found", "no step 3", {"errno": code})) == "no step 3"


def test_a_root_removed_under_its_manager_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with sw.CheckpointManager(root) as manager:
        shutil.rmtree(root)
        root.mkdir()  # another one, which the manager knows nothing of
        with pytest.raises(sw.SaveFailed, match="removed or moved while it was in use: make a new manager"):
            manager.save(0, {"a": 1}).result()


def test_a_link_that_leads_nowhere_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "disk").symlink_to(tmp_path / "unmounted")
    with pytest.raises(OSError, match=r"disk is a link that leads nowhere"):
        sw.CheckpointManager(tmp_path / "disk" / "run")


def test_every_error_class_is_public() -> None:
    for one in errors.BY_KIND.values():
        assert getattr(errors, one.__name__) is one
        flat = getattr(sw, one.__name__, None)
        assert one.__module__ == ("stepwell" if flat is one else "stepwell.errors")
    assert {"StepwellError", "StepNotFound", "CorruptCheckpoint", "SaveFailed"} <= set(sw.__all__)


def test_what_cannot_be_looked_at_is_not_called_nothing_there(tmp_path: Path) -> None:
    # A link that leads to itself: the system says ELOOP, as it says EACCES or EIO of other places.
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for call in (sw.restore, sw.open, sw.metadata, sw.verify):
        with pytest.raises(sw.StorageError) as caught:
            call(loop / "run")
        assert caught.value.errno == errno.ELOOP, call
    with pytest.raises(sw.StorageError):
        sw.add_metrics(loop / "run", 0, {"loss": 1.0})
    with pytest.raises(sw.StorageError):
        list(sw.watch(loop / "run", timeout=0))


def test_a_link_that_leads_nowhere_is_not_called_a_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(sw.MisuseError, match="a link that leads nowhere"):
        sw.CheckpointManager(link)
    with pytest.raises(sw.MisuseError, match="is a symlink"):
        sw.save(link, {"x": 1})
    with pytest.raises(sw.StepNotFound, match="a link that leads nowhere"):
        sw.restore(link)


def test_a_damaged_step_names_an_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    with sw.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(step, {"x": step}).result()
    manifest = root / "step_00000002" / "manifest.json"
    content = bytearray(manifest.read_bytes())
    content[len(content) // 2] ^= 1
    manifest.write_bytes(content)
    for call in (sw.restore, sw.open, sw.metadata):
        with pytest.raises(sw.CorruptCheckpoint):
            call(root, step=2)
        caplog.clear()
        call(root)
        deadline = time.monotonic() + 30
        while "step_00000002" not in caplog.text:  # it is told on another thread
            assert time.monotonic() < deadline, call
            time.sleep(0.01)
    with sw.CheckpointManager(root, read_only=True) as reader:
        assert reader.latest_step() == 1
        with pytest.raises(sw.CorruptCheckpoint):
            reader.restore(2)


def test_a_name_that_breaks_lines_does_not_break_those_of_a_plan(tmp_path: Path) -> None:
    sw.save(tmp_path / "x", {"a\nrestore of step 9": 1, "b\x1b[31m": 2})
    with sw.open(tmp_path / "x") as checkpoint:
        text = str(checkpoint.plan())
    assert "\x1b" not in text
    assert not any(line.startswith("restore of step 9") for line in text.splitlines())


def test_messages_of_the_engine_do_not_speak_python() -> None:
    literal = re.compile(r'"((?:[^"\\]|\\.)*)"')
    python = re.compile(r'\b\w+=(True|False|None|\\")|\bsw\.[A-Za-z]|\b[a-z]+(_[a-z]+)+\(\)|\bOptions\(')

    def spoken(line: str) -> bool:
        return any(python.search(text) for text in literal.findall(line))

    for said in ("pass read_only=True", 'pass exists=\\"skip\\"', "call update_guard()", "as sw.PerRank"):
        assert spoken(f'Error::Invalid("{said}")'), said
    found = []
    for folder in ("core/src", "manager/src"):
        files = [
            file
            for file in (SOURCES / folder).rglob("*.rs")
            if "test" not in file.relative_to(SOURCES).as_posix()
        ]
        assert len(files) > 20
        for file in files:
            product = file.read_text().split("#[cfg(test)]\nmod tests", 1)[0]
            lines = [line.strip() for line in product.splitlines()]
            code = [line for line in lines if not line.startswith(("//", "#[expect"))]
            found += [f"{file.name}: {line}" for line in code if spoken(line)]
    assert found == []


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state now")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"opt": Failing()}}, "a/opt"),
        ({"a": [1, Failing()]}, "a[1]"),
        ({"a": ([Failing()],)}, "a[0][0]"),
    ],
)
def test_an_error_of_an_object_names_its_leaf(tmp_path: Path, state: Any, path: str) -> None:
    with pytest.raises(RuntimeError, match="no state now") as caught:
        sw.save(tmp_path / "one", state)
    assert any(f"`{path}`" in note for note in caught.value.__notes__)


def test_a_selection_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(sw.MisuseError, match="the globs select none of its leaves"):
        sw.save(tmp_path / "one", {"a": 1}, exclude="**")


def test_a_missing_key_of_a_checkpoint_names_a_near_one(tmp_path: Path) -> None:
    sw.save(tmp_path / "one", {"t": {"model/weight": {"v": 1}, "model": {"weight": 2}}})
    with sw.open(tmp_path / "one") as checkpoint:
        with pytest.raises(KeyError, match="did you mean 't/model/weight'"):
            checkpoint["t/model/wieght"]
        with pytest.raises(KeyError, match="did you mean 'model/weight'"):
            checkpoint["t"]["model/wieght"]
