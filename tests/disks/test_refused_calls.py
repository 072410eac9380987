"""System calls that are refused, as seccomp profiles and old kernels do: the same bytes on the
disk, or an error that says which call it was."""

from __future__ import annotations

import shutil

import pytest
import refusing
from conftest import need_nothing_of
from lab import Lab
from repeated import repeat

ANSWERS = ("ENOSYS", "EPERM", "ENOMEM", "EINVAL", "EACCES")
RING = ("io_uring_setup", "io_uring_enter", "io_uring_register")
#: Alone, and in company as a sandbox refuses them.
REFUSED = [
    *((call,) for call in refusing.X86_64),
    RING,
    (*RING, "openat2", "statx", "renameat2"),
    tuple(refusing.X86_64),
]
#: Required calls: these answers are errors. Every other refusal changes no byte.
ERRORS = {
    # A missing call is replaced, except for the swap that replaces a step: without it a power cut
    # could lose both. Any other answer concerns that very file.
    ("renameat2", "ENOSYS"), ("renameat2", "EINVAL"), ("renameat2", "EPERM"), ("renameat2", "ENOMEM"), ("renameat2", "EACCES"),
    # ENOSYS is gone round. The others may be a full disk, a quota, or a file that may not grow.
    ("fallocate", "EPERM"), ("fallocate", "ENOMEM"), ("fallocate", "EINVAL"), ("fallocate", "EACCES"),
    ("openat2", "ENOMEM"), ("openat2", "EACCES"),
}  # fmt: skip


def test_a_refused_call_changes_nothing_or_names_the_change(lab: Lab) -> None:
    need_nothing_of(refusing.missing())
    disk = lab.mount("tmpfs", "disk", "tmpfs", "size=256m")
    expected = repeat(disk / "expected")
    assert expected.verdict == "saved"
    same, errors, engines = 0, [], set()
    for calls in REFUSED:
        for answer in ANSWERS:
            where = f"{','.join(calls)}: {answer}"
            found = repeat(disk / "run", before=refusing.refusing(calls, answer))
            if found.verdict == "saved":
                assert found.files == expected.files, where
                same += 1
                engines.add(found.engine)
            else:
                assert any((call, answer) in ERRORS for call in calls), (where, found)
                assert found.verdict.startswith("error "), (where, found)
                errors.append(f"{where}: {found.verdict.replace(str(disk / 'run'), '')}")
            shutil.rmtree(disk / "run", ignore_errors=True)
    print(
        f"\n{len(REFUSED) * len(ANSWERS)} refusals: {same} with the same bytes, through {sorted(engines)}; {len(errors)} errors:"
    )
    print("\n".join(sorted(errors, key=len)))
    assert same >= len(REFUSED) * len(ANSWERS) // 2


@pytest.mark.parametrize("answer", ["ENOSYS", "EPERM", "ENOMEM"])
def test_without_io_uring_threads_write_the_same_bytes(lab: Lab, answer: str) -> None:
    need_nothing_of(refusing.missing())
    for call in RING[:2]:
        found = repeat(lab.at / call, before=refusing.refusing([call], answer))
        assert found.verdict == "saved"
        assert found.engine.startswith("threads"), found
