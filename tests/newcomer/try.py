"""A newcomer's first hour with nothing but the wheel: install it into a clean virtual environment,
run the first example of the README, get killed in the middle, resume, and make the common mistakes.
The message of each must name the remedy.

``python try.py WHEEL [FOLDER [FRAMEWORK …]]`` prints what was tried and what came of it. It exits
with 0 if all is as it should be, 1 if something is not, and 3 if the dependencies could not be had,
so that nothing could be tried. Frameworks (``torch``, ``jax``, ``transformers``) are installed too,
and a training of each is killed and resumed.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainings import SCRIPTS

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
DEADLINE = 120.0
NOTHING_TO_TRY = 3


class Newcomer:
    """Somebody with an empty folder, a Python that has the wheel, and no knowledge of the
    sources."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self.failures = 0

    def start(self, script: str, *, folder: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Runs a script beside this one. Its environment has nothing of ours: no PYTHONPATH, no
        job."""
        clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        return subprocess.Popen(
            [str(self.python), "-c", script],
            cwd=folder or self.folder,
            env={**clean, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *, folder: Path | None = None, **environment: str) -> tuple[int, str]:
        process = self.start(script, folder=folder, **environment)
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
        return process.returncode, output

    def tell(self, what: str, found: str, missing: list[str]) -> None:
        self.failures += bool(missing)
        print(f"{'NOT SO' if missing else 'ok':8}{what}")
        for line in found.strip().splitlines()[-1:]:
            print(f"          {line}")
        if missing:
            print(f"          missing in what it said: {missing}\n{found}")

    def expects(self, what: str, script: str, *parts: str, code: int = 1, **environment: str) -> None:
        """A mistake: it ends with this status, and the last lines have all these parts."""
        status, output = self.run("import numpy as np, stepwell as sw\n" + script, **environment)
        wrong = [f"exit status {code}, and not {status}"] if status != code else []
        self.tell(what, output, wrong + [part for part in parts if not re.search(part, output)])


def clean_environment(wheel: Path, where: Path, frameworks: list[str]) -> Path:
    """A virtual environment with the wheel, what it depends on and the frameworks, and nothing
    else."""
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    python = where / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The wheel itself must go in, whatever can be reached from here.
    subprocess.run([*install, "--no-deps", str(wheel)], check=True)
    dependencies = subprocess.run([*install, str(wheel)], capture_output=True, text=True, check=False)
    if dependencies.returncode:
        print(f"the dependencies cannot be had here: {dependencies.stderr.strip().splitlines()[-1:]}")
        sys.exit(NOTHING_TO_TRY)
    needed = {"transformers": ["torch", "transformers", "accelerate"]}
    for framework in frameworks:
        subprocess.run([*install, *needed.get(framework, [framework])], check=True)
    return python


def first_example() -> str:
    found = re.search(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"{README} has no example")
    return found[1]


def killed(newcomer: Newcomer, script: str, name: str, committed: str) -> Path | None:
    """Kills a script when it has two steps that match a pattern. Returns the folder that it ran
    in."""
    for attempt in range(10):
        folder = newcomer.folder / f"{name}-{attempt}"
        folder.mkdir()
        process = newcomer.start(script, folder=folder)
        end, has_two = time.monotonic() + DEADLINE, False
        while process.poll() is None and time.monotonic() < end and not has_two:
            time.sleep(0.002)
            has_two = len(list(folder.glob(committed))) >= 2
        process.kill()
        output, _ = process.communicate()
        if process.returncode == -signal.SIGKILL and has_two:
            return folder
    newcomer.tell(f"{name} is killed in the middle", output, ["two steps, and then a kill before its end"])
    return None


def kill_and_resume(newcomer: Newcomer) -> None:
    """The example of the README, killed while it runs, and run again."""
    example = first_example()
    folder = killed(newcomer, example, "example", "runs/first/step_*")
    if folder is None:
        return
    look = """
import stepwell as sw
with sw.open("runs/first") as checkpoint:
    step, updates = checkpoint.step, checkpoint["updates"]
    assert (checkpoint["params"]["w"][...] == updates).all() and updates == step + 1
assert sw.verify("runs/first").ok
print("step", step, "is whole")
"""
    status, output = newcomer.run(look, folder=folder)
    newcomer.tell("kill -9 in the middle of the first example", output, ["a whole step"] if status else [])
    status, output = newcomer.run(example, folder=folder)
    newcomer.tell("run it again: it goes on without a word", output, ["silence"] if status or output else [])
    status, output = newcomer.run(look + "assert step == 9", folder=folder)
    newcomer.tell("and the last step is as if nothing had happened", output, ["step 9"] if status else [])


def training(newcomer: Newcomer, framework: str) -> None:
    """A training with a framework, killed and run again, and beside it one that is not killed."""
    script, committed = SCRIPTS[framework]
    folder = killed(newcomer, script, framework, committed)
    if folder is None:
        return
    alone = newcomer.folder / f"{framework}-alone"
    alone.mkdir()
    (status, undisturbed), (resumed_status, resumed) = (
        newcomer.run(script, folder=one) for one in (alone, folder)
    )
    missing = [f"exit status 0 of both, not {status} and {resumed_status}"] * bool(status or resumed_status)
    missing += ["the loss of the undisturbed run"] * (
        resumed.splitlines()[-1:] != undisturbed.splitlines()[-1:]
    )
    # A training that begins again has the same loss too.
    missing += ["a resume"] * (re.search(r"^steps before: [1-9]", resumed, re.MULTILINE) is None)
    newcomer.tell(f"kill -9 in a training with {framework}, run again: the same loss", resumed, missing)


def mistakes(newcomer: Newcomer) -> None:
    newcomer.expects(
        "one of several processes, and nothing said of the others",
        "sw.CheckpointManager('runs/several')",
        "WORLD_SIZE=2", "pass coordinator=None if only this one",
        WORLD_SIZE="2", RANK="0",
    )  # fmt: skip
    newcomer.expects(
        "the remedy for that",
        "with sw.CheckpointManager('runs/several', coordinator=None) as m: m.save(0, {'a': 1})",
        code=0, WORLD_SIZE="2", RANK="0",
    )  # fmt: skip
    newcomer.expects(
        "a function in the state",
        "sw.save('lambda', {'params': {'w': np.ones(3)}, 'schedule': {'rate': lambda step: 0.1}})",
        "UnsupportedLeaf", "`schedule/rate`", "leave it out, or store",
    )  # fmt: skip
    newcomer.expects(
        "an object of a class of one's own in the state",
        "class Tokenizer: pass\nsw.save('object', {'tokenizer': Tokenizer()})",
        "UnsupportedLeaf", "`tokenizer`", r"state_dict\(\)/load_state_dict\(\), or sw.register\(\)",
    )  # fmt: skip
    final = "with sw.CheckpointManager('runs/final') as m:\n    "
    newcomer.expects("a run with two steps", final + "m.save(1, {'a': 1}); m.save(5, {'a': 1})", code=0)
    newcomer.expects(
        "a final save of a step that is there", final + "m.save(5, {'a': 2})", "StepExists", 'exists="skip"'
    )
    newcomer.expects("the remedy for that", final + "m.save(5, {'a': 2}, exists='skip')", code=0)
    newcomer.expects(
        "a step below the newest one", final + "m.save(3, {'a': 1})", "StepOrder", r"rewind to step 1 first"
    )
    newcomer.expects(
        "the remedy for that", final + "m.rewind(1); m.save(3, {'a': 1}); print(m.all_steps())", code=0
    )
    newcomer.expects("a mistyped root, read", "sw.restore('runs/finel')", "StepNotFound", "near it is final")
    newcomer.expects(
        "a mistyped root, trained into",
        "with sw.CheckpointManager('runs/finall') as m: m.restore()",
        "StepNotFound", "nothing was saved in this root yet", "near its name are final",
    )  # fmt: skip
    newcomer.expects("the folder above a root", "sw.restore('runs')", "it holds the roots", "pass that path")
    newcomer.expects(
        "a state of another shape",
        "sw.save('shape', {'w': np.ones((2, 3))})\nsw.restore('shape', like={'w': np.ones((3, 2)), 'bias': np.ones(2)})",
        "MismatchError", r"`?w`?.*\(2, 3\).*\(3, 2\)", "bias",
    )  # fmt: skip
    newcomer.expects(
        "a manager that was closed",
        "with sw.CheckpointManager('runs/closed') as m: pass\nm.save(0, {})",
        "ClosedError", "make a new one",
    )  # fmt: skip
    second_job(newcomer)
    no_io_uring(newcomer)
    full_disk(newcomer)


def second_job(newcomer: Newcomer) -> None:
    holder = newcomer.start(
        "import stepwell as sw\nwith sw.CheckpointManager('runs/busy'): print('open', flush=True); input()"
    )
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        newcomer.expects(
            "a second job on the same root",
            "sw.CheckpointManager('runs/busy')",
            "LockedError", f"process {holder.pid}", "read_only=True",
        )  # fmt: skip
    finally:
        holder.communicate("\n", timeout=DEADLINE)


def no_io_uring(newcomer: Newcomer) -> None:
    """A container as Docker makes it: io_uring is forbidden."""
    script = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import forbid
forbid.io_uring()
import numpy as np, stepwell as sw
info = sw.engine_info(".")
with sw.CheckpointManager("runs/container") as m:
    m.save(0, {{"a": np.arange(1 << 20)}}).result()
    assert (m.restore()["a"] == np.arange(1 << 20)).all()
print(info["engine"], "because", " ".join(info["reasons"]))
"""
    status, output = newcomer.run(script)
    parts = ["^(threads|buffered) because", "seccomp"]
    missing = [part for part in parts if not re.search(part, output, re.MULTILINE)]
    missing += ["exit status 0"] * bool(status)
    newcomer.tell("a container that forbids io_uring", output, missing)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 8 MiB, if this user may mount one."""
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


def full_disk(newcomer: Newcomer) -> None:
    fill = """
with sw.CheckpointManager({root!r}) as m:
    m.save(0, {{"a": np.ones(1 << 18)}}).result()
    try:
        m.save(1, {{"a": np.ones(1 << 21)}}).result()
    finally:
        assert (m.restore()["a"] == 1).all() and m.all_steps() == [0]
        m.save(2, {{"a": np.ones(1 << 18)}}).result()
"""
    with small_disk(newcomer.folder / "small") as mounted:
        if mounted:
            newcomer.expects(
                "a full disk",
                fill.format(root="small/run"),
                "SaveFailed", "saving step 1 failed", "No space left", "free space there, or keep fewer steps",
            )  # fmt: skip
        else:
            print("skipped a full disk: this user may not mount a small one; a limit of file sizes stands in")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, resource.RLIM_INFINITY))\n"
    newcomer.expects(
        "a limit of file sizes",
        limit + fill.format(root="runs/limited"),
        "SaveFailed", "saving step 1 failed", "File too large", "ulimit -f",
    )  # fmt: skip


def main(wheel: Path, folder: Path, frameworks: list[str]) -> int:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    python = clean_environment(wheel, folder / "venv", frameworks)
    newcomer = Newcomer(python, folder)
    scenes: list[Callable[[Newcomer], None]] = [kill_and_resume, mistakes]
    for scene in scenes:
        scene(newcomer)
    for framework in frameworks:
        training(newcomer, framework)
    print(
        f"{newcomer.failures} of these were not as they should be" if newcomer.failures else "all of it is so"
    )
    return bool(newcomer.failures)


if __name__ == "__main__":
    chosen = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        status = main(Path(sys.argv[1]).resolve(), chosen, sys.argv[3:])
    finally:
        if len(sys.argv) <= 2:
            shutil.rmtree(chosen, ignore_errors=True)
    sys.exit(status)
