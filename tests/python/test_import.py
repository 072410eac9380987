"""The cost of importing the package, and the imported modules."""

from __future__ import annotations

import builtins
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import stepwell as sw


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_importing_the_package_imports_no_framework() -> None:
    modules = set(run("import sys, stepwell; print(*sys.modules)").split())
    assert not modules & {"torch", "jax", "click", "rich", "asyncio"}


def test_listing_steps_imports_neither_framework_nor_numpy(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path) as manager:
        manager.save(0, {"updates": 3})
    code = f"""
import sys
from stepwell._cli import main
sys.argv = ["stepwell", "ls", {str(tmp_path)!r}]
try:
    main()
except SystemExit as end:
    print(end.code, *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    listed, modules = run(code).strip().rsplit("\n", 1)
    assert "1 step" in listed
    assert modules.split()[0] == "0"
    assert not {"torch", "jax", "numpy", "ml_dtypes"} & set(modules.split())


def test_every_public_name_is_there_and_listed() -> None:
    for name in sw.__all__:
        assert getattr(sw, name) is not None
    assert set(sw.__all__) - {"__version__"} <= set(dir(sw))
    assert len(sw.__all__) <= 69
    assert not set(sw.__all__) & set(dir(builtins))
    with pytest.raises(AttributeError, match="no attribute 'restor'"):
        sw.restor  # noqa: B018


def test_a_name_means_the_same_after_all_imports() -> None:
    code = "import stepwell as sw; first = {n: getattr(sw, n) for n in reversed(sw.__all__)}; print(all(getattr(sw, n) is first[n] for n in sw.__all__))"
    assert run(code).strip() == "True"


def test_the_import_costs_at_most_30_milliseconds() -> None:
    def seconds(code: str) -> float:
        """CPU time of the child: other work on the machine does not count."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # In turn: a machine that is slow for a while is slow for both.
    pairs = [
        (seconds("import numpy, ml_dtypes"), seconds("import numpy, ml_dtypes, stepwell")) for _ in range(9)
    ]
    alone = statistics.median(alone for alone, _ in pairs)
    extra = statistics.median(both - alone for alone, both in pairs)
    print(f"import stepwell: {1000 * extra:.0f} ms beyond numpy and ml_dtypes ({1000 * alone:.0f} ms)")
    # Memory that is being given back to a host makes any process slower: then both are.
    assert extra < max(0.030, 0.30 * alone)


def test_the_types_are_known_to_type_checkers() -> None:
    assert (Path(sw.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("space", ["coordinators", "events", "providers", "results", "sharding"])
def test_a_namespace_holds_public_classes_under_its_name(space: str) -> None:
    module = getattr(sw, space)
    assert module.__all__
    for name in module.__all__:
        found = getattr(module, name)
        assert found.__module__ in ("stepwell", f"stepwell.{space}"), found
        assert getattr(sys.modules[found.__module__], name) is found


def test_a_name_of_a_namespace_is_found_from_the_flat_one() -> None:
    with pytest.raises(AttributeError, match=r"It is sw\.coordinators\.SharedDirectory"):
        sw.SharedDirectory  # noqa: B018
    with pytest.raises(AttributeError, match=r"It is sw\.errors\.StepGone"):
        sw.StepGone  # noqa: B018


def test_a_missing_framework_is_named_before_a_read(tmp_path: Path) -> None:
    code = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax"):
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Absent())
import stepwell as sw

path = {str(tmp_path / "c")!r}
sw.save(path, {{}})
for keywords in ({{"to": "torch"}}, {{"to": "jax"}}, {{"to": "torch", "device": "cpu"}}, {{"like": {{}}, "shardings": print}}):
    try:
        sw.restore(path, **keywords)
    except sw.MisuseError as error:
        print(error)
"""
    lines = run(code).splitlines()
    wanted = [('to="torch"', "torch"), ('to="jax"', "jax"), ('to="torch"', "torch"), ("shardings=", "jax")]
    assert len(lines) == len(wanted)
    for line, (option, name) in zip(lines, wanted, strict=True):
        assert line.startswith(f"{option} needs {name}, which cannot be imported (No module named '{name}')")
        assert f"Install {name}, or leave" in line
