"""Mistakes in URLs, settings and credentials of object stores: a clear error without a secret."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
from command_line import process

SECRET = "wonderful"


def refused(call: Any, kind: type[Exception] = sw.MisuseError) -> str:
    """The message of the error of a call. It has no secret."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert SECRET[:6] not in text, text
    return text


@pytest.mark.parametrize(
    "settings",
    [
        {"credentials": {"secret_access_key": SECRET}},
        {"credentials": SECRET},
        {"profile": {"aws_secret_access_key": SECRET}},
        {"region": [SECRET]},
        {"endpoint": f"http://user:{SECRET}@127.0.0.1:9"},
        {"endpoint": f"http://127.0.0.1:9?sig={SECRET}"},
    ],
)
def test_wrong_settings_of_a_store_are_not_shown(settings: dict[str, Any]) -> None:
    assert "of a Store" in refused(lambda: sw.Store("s3://bucket/run", **settings))


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET}@bucket/run",
        f"s3://AKIA:won/{SECRET}@bucket/run",
        f"abfss://user:{SECRET}@account/run",
        f"s3://bucket/run?X-Amz-Signature={SECRET}",
        f"https://bucket.s3.amazonaws.com/run?X-Amz-Signature={SECRET}",
        f"https://user:{SECRET}@host/run",
        f"minio://user:{SECRET[:6]}#{SECRET[6:]}@host/run",
        f"minio://user:{SECRET[:6]}?{SECRET[6:]}@host/run",
        f"https://account.blob.core.windows.net/c/run?sig={SECRET}",
        f"s3:/key:{SECRET}@bucket/run",
    ],
)
def test_secrets_of_urls_are_not_shown(url: str) -> None:
    for call in (sw.inspect, sw.restore, sw.CheckpointManager):
        refused(lambda call=call: call(url))
    refused(lambda: sw.Store(url))


@pytest.mark.parametrize(
    ("variable", "value", "flaw"),
    [
        ("AWS_ACCESS_KEY_ID", "some\none", "has a line break"),
        ("AWS_ACCESS_KEY_ID", "söme", "not ASCII"),
        ("AWS_SECRET_ACCESS_KEY", f"{SECRET}\n", "ends in a line break"),
        ("AWS_SESSION_TOKEN", f"{SECRET}\n", "ends in a line break"),
        ("AWS_REGION", "not a region", "letters, digits"),
        ("AWS_REGION", "us-east-1\n", "ends in a line break"),
        ("AWS_ENDPOINT_URL", f"http://u:{SECRET}@127.0.0.1:9", "a user or a password"),
    ],
)
def test_variables_that_cannot_be_sent_are_named(
    fake_s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, flaw: str
) -> None:
    for name, usual in (fake_s3 | {variable: value}).items():
        monkeypatch.setenv(name, usual)
    text = refused(lambda: sw.inspect("s3://bucket/run"))
    assert flaw in text
    assert ("endpoint" if "ENDPOINT" in variable else variable) in text


def test_bucket_names_that_no_url_has_are_refused(stored: str) -> None:
    for url in ("s3://buck et/run", "s3://bücket/run", "s3://bucket/a\nb"):
        refused(lambda url=url: sw.inspect(url))


@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "token"])
def test_credentials_that_cannot_be_sent_are_named(stored: str, name: str) -> None:
    given = {"access_key_id": "a", "secret_access_key": "b"} | {name: f"{SECRET}\n"}
    root = sw.Store(stored, credentials=lambda: given)
    text = refused(lambda: sw.inspect(root), sw.StorageError)
    assert f"{name} ends in a line break" in text


@pytest.fixture
def stored(fake_s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A URL with nothing below, in the fake server."""
    for name, value in fake_s3.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name.replace('[', '-').rstrip(']')}"


def test_no_root_or_checkpoint_hides_another_one(stored: str) -> None:
    with sw.CheckpointManager(stored) as mgr:
        mgr.save(1, {"x": 1}).result()
    for name in ("step_00000001", ".stepwell"):
        for read_only in (True, False):
            refused(
                lambda name=name, read_only=read_only: sw.CheckpointManager(
                    f"{stored}/{name}", read_only=read_only
                )
            )
    for name in ("step_00000001", ".stepwell/x", ".stepwell"):
        refused(lambda name=name: sw.save(f"{stored}/{name}", {"x": 2}, exists="replace"))
    assert sw.restore(stored) == {"x": 1}


def _object(variables: dict[str, str], key: str, body: bytes | None = None) -> bytes:
    """Reads or writes an object of the fake server."""
    url = f"{variables['AWS_ENDPOINT_URL']}/bucket/{key}"
    method = "GET" if body is None else "PUT"
    asked = urllib.request.Request(url, body, {"Authorization": "x"}, method=method)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return bytes(answer.read())


def test_a_flipped_bit_of_root_json_hides_no_step(
    stored: str, fake_s3: dict[str, str], tmp_path: Path
) -> None:
    with sw.CheckpointManager(stored) as mgr:
        mgr.save(1, {"x": 1}).result()
    key = f"{stored.removeprefix('s3://bucket/')}/.stepwell/root.json"
    intact = _object(fake_s3, key)
    _object(fake_s3, key, intact.replace(b'"step_"', b'"stdp_"'))
    for read_only in (True, False):
        text = refused(
            lambda read_only=read_only: sw.CheckpointManager(
                stored, read_only=read_only, options=sw.Options(silence=0.2)
            ),
            sw.errors.FormatError,
        )
        assert "root.json" in text
        assert "delete this file" in text
    _object(fake_s3, key, intact)
    assert sw.restore(stored) == {"x": 1}


def test_a_checkpoint_is_not_saved_among_other_objects(stored: str, fake_s3: dict[str, str]) -> None:
    _object(fake_s3, f"{stored.removeprefix('s3://bucket/')}/data.csv", b"1,2")
    assert "no checkpoint" in refused(lambda: sw.save(stored, {"x": 1}))
    sw.save(f"{stored}/below", {"x": 1})
    assert sw.restore(f"{stored}/below") == {"x": 1}


def test_what_is_for_disks_says_so(stored: str, tmp_path: Path) -> None:
    with sw.CheckpointManager(stored) as mgr:
        mgr.save(1, {"x": 1}).result()
    assert "repair is for disks" in refused(lambda: sw.repair(stored))
    assert "space of a disk" in refused(lambda: sw.advise(stored, mtbf=3600.0))
    done = process("repair", stored)
    assert done.returncode != 0
    assert "repair is for disks" in done.stderr
    page = tmp_path / "report.html"
    done = process("report", stored, "-o", str(page))
    assert done.returncode == 0, done.stderr
    assert stored in page.read_text()


@pytest.fixture
def shared_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the shared files of AWS, and no other credentials."""
    from stepwell import _store

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    _store._of_profile.cache_clear()
    return tmp_path


def _write_keys(directory: Path, key: str) -> None:
    text = f"[work]\naws_access_key_id = {key}\naws_secret_access_key = s\n"
    (directory / "credentials").write_text(text)


def test_replaced_keys_of_a_profile_are_read_again(shared_files: Path) -> None:
    from stepwell import _store

    _write_keys(shared_files, "first")
    function = _store._of_profile("work")
    assert function()["access_key_id"] == "first"
    _write_keys(shared_files, "second")
    assert function()["access_key_id"] == "second"


def test_other_settings_of_the_default_profile_are_no_keys(shared_files: Path) -> None:
    from stepwell import _store

    (shared_files / "config").write_text("[default]\ncli_pager =\n")
    assert _store._default_profile() is None
    (shared_files / "config").write_text("[default]\nsso_session = x\n")
    assert _store._default_profile() == "default"


def test_an_unknown_profile_is_named(shared_files: Path) -> None:
    pytest.importorskip("boto3")
    store = sw.Store("s3://bucket/run", profile="nobody", region="us-east-1")
    assert "nobody" in refused(lambda: sw.inspect(store))
