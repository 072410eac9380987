"""A server of S3 buckets on this machine, by moto."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from ranks import free_port


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """Starts a server with an empty bucket. Gives the variables that lead a client to it."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                made = urllib.request.Request(f"{address}/{bucket}", method="PUT")
                urllib.request.urlopen(made, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "wonderful-secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()
