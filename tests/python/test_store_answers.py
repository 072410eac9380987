"""Answers of object stores that are wrong, refused or late, and the errors that name them."""

from __future__ import annotations

import datetime
import json
import re
import ssl
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).parent))
from command_line import process
from fake_store import DIALECTS, control, fake_store

_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}
_ADDRESSES = {"s3": "AWS_ENDPOINT_URL", "gcs": "STORAGE_EMULATOR_HOST", "azure": "AZURE_STORAGE_ENDPOINT"}
SECRET = "wonderful"


def state(step: int) -> dict[str, np.ndarray]:
    """One leaf of several parts of an upload, and a small one."""
    return {"w": np.arange(5 << 20, dtype=np.float32) + np.float32(step), "b": np.full(7, step)}


def assert_is(found: dict[str, Any], step: int) -> None:
    for name, value in state(step).items():
        assert np.array_equal(found[name], value), f"{name} of step {step} is wrong"


@pytest.fixture(scope="module", params=DIALECTS)
def cloud(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    """A server of each dialect."""
    with fake_store(request.param) as variables:
        yield request.param, variables


def _lead(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    control(variables, "faults")


def _root(dialect: str, name: str, bucket: str = "bucket") -> str | sw.Store:
    url = f"{_SCHEMES[dialect]}://{bucket}/{name}"
    return sw.Store(url, credentials=lambda: {"token": "t"}) if dialect == "gcs" else url


def _told(call: Any, kind: type[Exception] = sw.StorageError) -> str:
    """The message of the error of a call. It has no secret."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert SECRET not in text, text
    return text


def test_a_login_page_is_no_empty_listing(
    cloud: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect, variables = cloud
    _lead(variables, monkeypatch)
    root = _root(dialect, "listed")
    with sw.CheckpointManager(root) as mgr:
        mgr.save(1, {"x": 1}).result()
    control(variables, "faults", {"kinds": ["login"], "only": ["list"]})
    try:
        for call in (
            lambda: sw.inspect(root),
            lambda: sw.restore(root),
            lambda: sw.CheckpointManager(root, read_only=True),
            lambda: sw.CheckpointManager(root),
            lambda: sw.save(root, {"x": 2}),
        ):
            assert "html: the server is no store of this kind, or a proxy has answered" in _told(call)
    finally:
        control(variables, "faults")
    assert sw.restore(root) == {"x": 1}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    answer: str
    #: The headers with credentials, and the paths.
    seen: list[str]
    paths: list[str]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.seen.append(self.headers.get("Authorization", ""))
        self.server.paths.append(self.path)
        body = self.server.answer.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _answering(answer: str, context: ssl.SSLContext | None = None) -> Iterator[_Server]:
    """A server that answers every GET with this body."""
    server = _Server(("127.0.0.1", 0), _Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.answer, server.seen, server.paths = answer, [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>", "ListAllMyBucketsResult"),
        ("<EnumerationResults><Blobs/></EnumerationResults>", "EnumerationResults"),
        ('{"kind": "storage#objects", "items": []}', "no XML"),
        ("", "no XML"),
    ],
)
def test_a_listing_of_another_kind_is_refused(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch, answer: str, found: str
) -> None:
    with _answering(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        assert f"no ListBucketResult, but {found}" in _told(lambda: sw.inspect("s3://bucket/run"))


def _request(variables: dict[str, str], method: str, key: str, body: bytes | None = None) -> bytes:
    url = f"{variables['AWS_ENDPOINT_URL']}/bucket{key}"
    asked = urllib.request.Request(url, body, {"Authorization": "x"}, method=method)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return bytes(answer.read())


def _data_file(variables: dict[str, str], url: str) -> str:
    listed = _request(variables, "GET", f"?list-type=2&prefix={url.removeprefix('s3://bucket/')}/")
    return next(key for key in re.findall("<Key>(.*?)</Key>", listed.decode()) if key.endswith(".data"))


@pytest.mark.parametrize("left", [0, 1000, 9 << 20])
@pytest.mark.parametrize("opened", [False, True])
def test_an_object_that_was_cut_short_is_corruption(
    store: dict[str, str], bucket: str, left: int, opened: bool
) -> None:
    with sw.CheckpointManager(bucket) as mgr:
        mgr.save(1, state(1)).result()
    key = _data_file(store, bucket)
    with sw.open(bucket) as checkpoint:
        if opened:
            checkpoint["b"][:]  # reads the end of the file
        _request(store, "PUT", f"/{key}", _request(store, "GET", f"/{key}")[:left])
        with pytest.raises(sw.CorruptCheckpoint) as caught:
            checkpoint.restore()
    text = str(caught.value)
    assert "416" not in text
    assert "/i0/00000.data is corrupt" in text
    assert "it has no bytes from" in text
    if opened:
        assert "leaf `" in text, text
    assert not sw.verify(bucket).ok


def _expiring(tokens: list[str], asked: list[str]) -> sw.Store:
    """A root whose function of credentials gives the last token."""

    def credentials() -> dict[str, str]:
        asked.append(tokens[-1])
        return {"access_key_id": "a", "secret_access_key": SECRET, "token": tokens[-1]}

    return sw.Store("s3://bucket/expiring", credentials=credentials)


@pytest.mark.parametrize("kind", ["start_upload", "part", "complete", "create", "put", "list", "get", "head"])
def test_refused_credentials_are_asked_for_once_more(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    control(store, "faults", {"kinds": ["expire"], "only": [kind], "limit": 1})
    tokens: list[str] = ["first"]
    asked: list[str] = []
    root = _expiring(tokens, asked)
    with sw.CheckpointManager(root, retention=1) as mgr:
        mgr.save(mgr.next_step(), state(1)).result()
        assert_is(mgr.restore(), 1)
        sw.inspect(root)


def test_credentials_that_expire_in_a_save_lose_nothing(store: dict[str, str]) -> None:
    tokens = ["token 1."]
    asked: list[str] = []
    with sw.CheckpointManager(_expiring(tokens, asked), retention=3) as mgr:
        first = mgr.next_step()
        for step in range(first, first + 4):
            control(store, "expire", {"token": tokens[-1]})
            tokens.append(f"token {step + 2}.")
            before = len(asked)
            mgr.save(step, state(step)).result()
            assert_is(mgr.restore(step), step)
            # Many requests are refused at once. They share one answer.
            assert len(asked) - before <= 3
    control(store, "expire")


def test_a_key_that_cannot_be_listed_is_named(store: dict[str, str], bucket: str) -> None:
    with sw.CheckpointManager(bucket) as mgr:
        mgr.save(1, {"x": 1}).result()
    stray = f"{bucket.removeprefix('s3://bucket/')}//cat.jpg"
    _request(store, "PUT", f"/{stray}", b"z")
    text = _told(lambda: sw.CheckpointManager(bucket))
    assert stray.removesuffix("cat.jpg") in text
    assert "Move or delete this object" in text
    _request(store, "DELETE", f"/{stray}")
    sw.CheckpointManager(bucket).close()


def test_a_missing_bucket_is_said(cloud: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    dialect, variables = cloud
    _lead(variables, monkeypatch)
    root = _root(dialect, "run", "nothing")
    for call in (sw.inspect, sw.restore, sw.CheckpointManager, lambda root: sw.save(root, {"x": 1})):
        text = _told(lambda call=call: call(root))
        assert "there is no such bucket or container. Create it" in text
        assert "//nothing" in text


@pytest.fixture
def without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no shared file gives credentials, and the machine has none either."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.usefixtures("without_credentials")
def test_missing_credentials_are_said(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with _answering("") as server:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        text = _told(lambda: sw.inspect("s3://bucket/run"))
    assert "no credentials were found" in text
    assert "AWS_ACCESS_KEY_ID" in text


def test_a_missing_account_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    text = _told(lambda: sw.inspect("az://container/run"), sw.MisuseError)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in text


@pytest.mark.usefixtures("without_credentials")
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_token_of_a_container_may_end_in_a_line_break(
    store: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    (tmp_path / "token").write_text(f"{SECRET}-token{end}", newline="")
    keys = {"AccessKeyId": "a", "SecretAccessKey": SECRET, "Token": "t", "Expiration": "2030-01-01T00:00:00Z"}
    with _answering(json.dumps(keys)) as server:
        monkeypatch.setenv(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/keys"
        )
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        with sw.CheckpointManager(bucket) as mgr:
            mgr.save(1, {"x": 1}).result()
        assert server.seen == [f"{SECRET}-token"]
        server.answer = "<html>"
        assert "AccessKeyId" in _told(lambda: sw.inspect("s3://second/run"))
    (tmp_path / "token").write_text(f"{SECRET}\n{SECRET}")
    assert "has a line break" in _told(lambda: sw.inspect("s3://third/run"))


@pytest.mark.parametrize("what", ["UnauthorizedSSOTokenError", "ClientError", "CredentialRetrievalError"])
def test_a_profile_whose_login_fails_is_said(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    boto3 = pytest.importorskip("boto3")
    from stepwell import _store

    errors = {
        "UnauthorizedSSOTokenError": exceptions.UnauthorizedSSOTokenError(),
        "ClientError": exceptions.ClientError(
            {"Error": {"Code": "AccessDenied", "Message": SECRET}}, "AssumeRole"
        ),
        "CredentialRetrievalError": exceptions.CredentialRetrievalError(provider="process", error_msg=SECRET),
    }

    def fail(_: Any) -> None:
        raise errors[what]

    (tmp_path / "config").write_text("[profile work]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(boto3.Session, "get_credentials", fail)
    _store._of_profile.cache_clear()
    text = _told(lambda: sw.inspect(sw.Store("s3://bucket/run", profile="work")))
    assert "the profile 'work' of AWS gave no credentials" in text
    assert "aws sso login --profile work" in text


def test_gc_deletes_retired_steps_of_an_unread_root(store: dict[str, str], bucket: str) -> None:
    with sw.CheckpointManager(bucket, retention=1) as mgr:
        for step in (1, 2):
            mgr.save(step, {"x": step}).result()
    left = process("gc", bucket)
    assert left.returncode == 0, left.stderr
    assert "somebody may read it; pass --unread if nobody reads this root" in left.stdout
    done = process("gc", bucket, "--unread")
    assert done.returncode == 0, done.stderr
    assert "left" not in done.stdout
    assert "deleted: .trash-" in done.stdout
    assert sw.restore(bucket) == {"x": 2}


def test_requests_go_through_a_proxy(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering("<ListBucketResult/>") as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "")
        root = sw.Store("s3://bucket/run", endpoint="http://store.invalid")
        assert "No such file" in _told(lambda: sw.inspect(root))
        assert server.paths[0].startswith("http://store.invalid/bucket?")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    sw.CheckpointManager("s3://bucket/beside").close()


def _certificate(folder: Path) -> Path:
    """A certificate of 127.0.0.1 and its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a store of this test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = folder / "store.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_certificates_of_a_file_are_trusted(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    file = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with _answering("<ListBucketResult/>", context) as server:
        root = sw.Store("s3://bucket/run", endpoint=f"https://127.0.0.1:{server.server_port}")
        monkeypatch.setenv(variable, str(file))
        assert "No such file" in _told(lambda: sw.inspect(root))
        assert server.paths[0].startswith("/bucket?")


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_a_bundle_without_certificates_is_refused(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "bundle.pem").write_text(text)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "bundle.pem"))
    told = _told(lambda: sw.inspect("s3://bucket/run"), sw.MisuseError)
    assert "bundle.pem of AWS_CA_BUNDLE" in told
