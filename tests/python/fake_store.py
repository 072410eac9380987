"""The fake server of object stores (``tests/src/bin/fake_store``) for Python tests."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIALECTS = ("s3", "gcs", "azure")
_REPOSITORY = Path(__file__).resolve().parents[2]
_BINARY = _REPOSITORY / "target" / "debug" / "fake_store"
#: The variables with the address of the server and the id of its process.
_ADDRESS, PROCESS = "STEPWELL_FAKE_STORE", "STEPWELL_FAKE_STORE_PROCESS"


def fake_store_binary() -> Path:
    """Returns the path of the server, and builds it if it is missing."""
    if not _BINARY.exists():
        command = ["cargo", "build", "--quiet", "-p", "stepwell-tests", "--bin", "fake_store"]
        subprocess.run(command, cwd=_REPOSITORY, check=True)
    return _BINARY


def _variables(dialect: str, address: str) -> dict[str, str]:
    found = {_ADDRESS: address}
    if dialect == "s3":
        return found | {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "wonderful-secret",
            "AWS_REGION": "us-east-1",
        }
    if dialect == "gcs":
        return found | {"STORAGE_EMULATOR_HOST": address}
    return found | {
        "AZURE_STORAGE_ENDPOINT": f"{address}/account",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": "d29uZGVyZnVsLXNlY3JldA==",
    }


@contextmanager
def fake_store(dialect: str) -> Iterator[dict[str, str]]:
    """Starts an empty server. Gives the variables that lead a client to it.

    Google's client has no variables for credentials of a test. Pass
    ``sw.Store(url, credentials=lambda: {"token": "t"})``.
    """
    process = subprocess.Popen(
        [str(fake_store_binary()), "--dialect", dialect],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline().split()
        assert line[:1] == ["listening"], "the server has not started"
        yield _variables(dialect, f"http://{line[1]}") | {PROCESS: str(process.pid)}
    finally:
        process.stdin.close()
        process.wait(timeout=10)
        process.stdout.close()


def control(variables: Mapping[str, str], path: str, body: Any = None) -> Any:
    """Sends a JSON body (``None``: an empty one) to a control path. Returns the answer."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{variables[_ADDRESS]}/_control/{path}", data=data, method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
