"""The contract for scripts, tested with the real command: standard output, standard error, exit
codes, errors."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import command_line
import pytest
import stepwell as sw
from command_line import document, documented, keys, make_root, process
from stepwell._cli.group import COMMANDS
from stepwell._cli.leftovers import is_locked


def test_importing_the_package_imports_no_command_line() -> None:
    script = "import sys, stepwell; print([one for one in ('click', 'rich', 'stepwell._cli') if one in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_ls_imports_no_module_of_another_command(root: Path) -> None:
    make_root(root)
    script = (
        "import sys\nfrom stepwell._cli.group import stepwell\n"
        "try: stepwell(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([one for one in ('rich', 'stepwell._cli.report', 'stepwell._comparison') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "ls", root], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_of_every_command_says_what_it_is_for() -> None:
    told = process("--help")
    assert told.returncode == 0
    for name, (_, line) in COMMANDS.items():
        assert name in told.stdout
        assert line[:30] in told.stdout
        own = command_line.run(name, "--help")
        assert own.exit_code == 0
        # Those of `recipe` have it each.
        assert "--json" in own.stdout or name == "recipe"


def test_a_mistyped_command_names_the_near_one() -> None:
    done = process("verfy", "x")
    assert done.returncode == 2
    assert "did you mean verify?" in done.stderr
    assert done.stdout == ""


def test_a_path_that_is_nothing_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for command in ("ls", "show", "verify"):
        done = process(command, tmp_path / "rnus")
        assert done.returncode == 1, done
        assert done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1
        assert "near it is runs" in done.stderr
    shown = process("show", tmp_path / "rnus", "--traceback")
    assert "Traceback" in shown.stderr
    assert shown.returncode == 1


def test_an_error_is_the_only_document_on_standard_output(tmp_path: Path) -> None:
    done = process("show", tmp_path / "nothing", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["command"] == "show"
    assert found["error"]["kind"] == "step_not_found"
    assert found["error"]["message"] in done.stderr


def test_a_checkpoint_where_a_root_is_needed_is_wrong_use(tmp_path: Path) -> None:
    sw.save(tmp_path / "single", {"a": 1})
    for arguments in (["gc"], ["prune", "--yes", "--keep-latest", "1"]):
        done = process(arguments[0], tmp_path / "single", *arguments[1:])
        assert done.returncode == 2
        assert "is no root but a checkpoint itself" in done.stderr
    assert process("ls", tmp_path / "single").returncode == 0
    assert not (tmp_path / "single" / ".stepwell").exists()


def test_a_writing_command_makes_no_root(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for arguments in (
        ["gc"],
        ["prune", "-y", "--keep-latest", "1"],
        ["rewind", "5", "-y"],
        ["rm", "5", "-y"],
    ):
        done = process(arguments[0], tmp_path / "photos", *arguments[1:])
        assert done.returncode == 1
        assert "is no root" in done.stderr
    assert list((tmp_path / "photos").iterdir()) == []


def test_the_document_is_all_of_standard_output(root: Path) -> None:
    make_root(root)
    done = process("ls", root, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["number_of_steps"] == 3
    assert len(done.stdout.splitlines()) == 1


def test_output_to_a_pipe_has_no_colours_and_no_bars(root: Path) -> None:
    make_root(root)
    for arguments in (["ls", root], ["verify", root], ["diff", f"{root}@0", f"{root}@10"]):
        done = process(*arguments, FORCE_COLOR="1")
        assert "\x1b" not in done.stdout + done.stderr


def test_a_reader_that_leaves_early_is_no_error(root: Path) -> None:
    make_root(root)
    command = [sys.executable, "-m", "stepwell", "show", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        told = child.stderr.read()
        assert child.wait(60) == 0
    assert told == b""


def test_a_held_root_is_neither_pruned_nor_rewound(root: Path) -> None:
    make_root(root)
    script = "import stepwell as sw, sys, time\nm = sw.CheckpointManager(sys.argv[1])\nprint('open', flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script, root], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "open\n"
            assert document("ls", root)["writer"] is True
            assert document("prune", root, "--keep-latest", "1", "--dry-run")["deleted"] == []
            for arguments in (
                ["prune", "-y", "--keep-latest", "1"],
                ["rewind", "0", "-y"],
                ["rm", "0", "-y"],
                ["gc"],
            ):
                done = process(arguments[0], root, *arguments[1:])
                assert done.returncode == 1
                assert "writer" in done.stderr
                assert "--dry-run" in done.stderr
                assert len(done.stderr.strip().splitlines()) == 1
            assert document("prune", root, "-y", "--keep-latest", "1", code=1)["error"]["kind"] == "locked"
        finally:
            trainer.kill()
    assert document("ls", root)["writer"] is False
    assert [step["step"] for step in document("ls", root)["steps"]] == [0, 10, 20]


def test_an_interrupt_ends_a_command_without_a_traceback(root: Path) -> None:
    make_root(root, steps=1)
    fifo = root.parent / "out.npy"
    os.mkfifo(fifo)
    # Nobody reads the pipe: the command waits in the open of its output, with the step leased.
    command = [sys.executable, "-m", "stepwell", "cat", str(root), "params/w", "-o", str(fifo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 60
        while not is_locked(str(root / "step_00000000" / ".lease")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        child.send_signal(signal.SIGINT)
        try:
            _, told = child.communicate(timeout=60)
        finally:
            child.kill()
        assert child.returncode == 130
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("adopt", "cat", "ls", "recipe")]
)
def test_a_document_has_the_keys_that_are_documented(command: str, root: Path, tmp_path: Path) -> None:
    make_root(root)
    more: dict[str, list[object]] = {
        "diff": [f"{root}@0"],
        "convert": [tmp_path / "converted", "--to", "safetensors", "--objects", "skip"],
        "export": [tmp_path / "exported", "--objects", "skip"],
        "cp": [tmp_path / "copy"],
        "prune": ["--keep-latest", 2, "--yes"],
        "rewind": [10, "--yes"],
        "rm": [10, "--yes"],
        "repair": ["--yes"],
        "report": ["-o", tmp_path / "report.html"],
        "advise": ["--mtbf", "12h"],
        "doctor": ["--mib", 1],
    }
    subject = "bash" if command == "completion" else root
    found = document(command, subject, *more.get(command, []), code=None)
    assert keys(found) == documented(command)


def test_documents_have_the_documented_keys(root: Path, tmp_path: Path) -> None:
    make_root(root)
    array = document("cat", root, "params/w")
    written = document("cat", root, "params/w", "-o", tmp_path / "w.npy")
    value = document("cat", root, "lr")
    listed = document("cat", root, "params")
    assert keys(array) | keys(written) | keys(value) | keys(listed) == documented("cat")
    steps, files = document("ls", root), document("ls", f"{root}/step_00000010")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/checkpoint_1").write_text("x")  # as Flax
    other = document("ls", tmp_path / "other")
    assert keys(steps) | keys(files) | keys(other) == documented("ls")
    sw.export(root, tmp_path / "x.safetensors", objects="skip")
    adopted = document("adopt", tmp_path / "x.safetensors")
    step = document("adopt", tmp_path / "x.safetensors", "--root", root, "--step", 7)
    assert keys(adopted) | keys(step) == documented("adopt")
    assert keys(step["steps"][0]["adopted"]) == {"path", "family", "bytes"}


def test_the_command_line_uses_the_public_api_only() -> None:
    own = Path(sw.__file__).parent / "_cli"
    private = []
    # One module tells paths and URLs apart, as the package does.
    for file in sorted(set(own.glob("*.py")) - {own / "locations.py"}):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level == 2 or node.module == "stepwell"):
                modules = [f"{node.module or ''}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                modules = [name.name for name in node.names if name.name.startswith("stepwell")]
            elif isinstance(node, ast.Attribute):
                own_value = isinstance(node.value, ast.Name) and node.value.id == "self"
                is_private = node.attr.startswith("_") and not node.attr.startswith("__") and not own_value
                modules = [node.attr] if is_private else []
            else:
                continue
            private += [(file.name, one) for one in modules if any(p.startswith("_") for p in one.split("."))]
    assert private == []
    assert len(list(own.glob("*.py"))) > 15
