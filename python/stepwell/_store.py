"""Object stores: URLs of roots and checkpoints, and how their store is reached."""

from __future__ import annotations

import configparser
import datetime
import functools
import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, final

from ._checks import flag, text, whole
from ._public import public
from .errors import MisuseError, StepwellError

if TYPE_CHECKING:
    import boto3  # type: ignore[import-untyped, unused-ignore]

#: Credentials by the names of their parts, and ``expires_at``.
CredentialValues: TypeAlias = Mapping[str, str | datetime.datetime | None]
CredentialFunction: TypeAlias = Callable[[], CredentialValues]

#: The schemes of stores, and the one that each stands for.
SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfss"}
#: S3 and GCS want parts of at least this length.
_LEAST_PART = 5 << 20
_LONGEST_PART = 1 << 30
#: The names of the parts of credentials.
_PARTS = ("access_key_id", "secret_access_key", "token", "account_key")
#: Settings of a profile of AWS that give credentials.
_OF_CREDENTIALS = frozenset(
    [
        "aws_access_key_id",
        "credential_process",
        "credential_source",
        "login_session",
        "role_arn",
        "source_profile",
        "sso_session",
        "sso_start_url",
        "web_identity_token_file",
    ]
)
#: Variables by which AWS gives credentials without a profile.
_WITHOUT_PROFILE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@public
@final
@dataclass(frozen=True, slots=True, repr=False)
class Store:
    """A URL of an object store, with settings of the store. Pass it in place of a path. Variables
    of the environment give what is not set, as for a plain URL.

    Args:
        url: a root or a checkpoint: ``s3://bucket/run``, ``gs://bucket/run``,
            ``az://container/run`` or ``abfss://container@account.dfs.core.windows.net/run``.
        endpoint: the URL of the server, for a store that is not the cloud's own.
        region: the region of an S3 bucket. Default: ``AWS_REGION``, then AWS is asked.
        profile: a profile of AWS, also one of SSO if boto3 is installed.
        credentials: a function that returns credentials. It is called again before they expire:
            at ``expires_at``, or after 5 minutes without one. S3: ``access_key_id``,
            ``secret_access_key`` and perhaps ``token``. Google: ``token``. Azure: ``account_key``
            or ``token``. It runs on a thread of its own and has 60 seconds.
        anonymous: sends no credentials, for a public bucket.
        virtual_hosted: names the bucket in the host, and not in the path (S3).
        part_bytes: bytes of a part of an upload. Parts of another length than 8 MiB are copied
            first, which needs memory for up to 32 of them.
        checksum: sends a CRC64NVME of each part, which the server checks (S3). Servers that do not
            know it refuse the upload.
    """

    url: str
    _: KW_ONLY
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials: CredentialFunction | None = None
    anonymous: bool = False
    virtual_hosted: bool = False
    part_bytes: int = 8 << 20
    checksum: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url(self.url, "the URL of a Store"))
        for name in ("endpoint", "region", "profile"):
            value = getattr(self, name)
            # A wrong one may hold keys, so that no message shows it.
            if value is not None and not isinstance(value, str):
                raise MisuseError(f"{name}= of a Store is a str, not {_kind(value)}")
            if value is not None:
                text(value, f"{name}= of a Store")
        if self.endpoint is not None and re.search("[@?#]", self.endpoint):
            raise MisuseError(
                "endpoint= of a Store has a user, a password or a query: pass https://host, and credentials="
            )
        if self.credentials is not None and not callable(self.credentials):
            raise MisuseError(
                f"credentials= of a Store is a function that returns them, not {_kind(self.credentials)}: "
                "pass a function, as credentials=lambda: {…}"
            )
        for name in ("anonymous", "virtual_hosted", "checksum"):
            flag(getattr(self, name), name)
        whole(self.part_bytes, "part_bytes", _LEAST_PART, _LONGEST_PART)
        if sum(one is not None for one in (self.profile, self.credentials)) + self.anonymous > 1:
            raise MisuseError("a Store takes one of profile=, credentials= and anonymous=True")

    def __repr__(self) -> str:
        # A URL has no password here, and a function shows none.
        return f"Store({self.url!r})"


class StoreUrl(str):
    """A URL of an object store, with what the engine needs to reach it."""

    settings: str
    part_bytes: int
    credentials: object

    def below(self, name: str) -> StoreUrl:
        """Returns the URL of a name below this one, in the same store."""
        return self._other(f"{self}/{name}")

    def above(self) -> StoreUrl:
        """Returns the URL without its last name, in the same store."""
        return self._other(self.rpartition("/")[0])

    def _other(self, url: str) -> StoreUrl:
        found = StoreUrl(url)
        found.__dict__.update(self.__dict__)
        return found


def is_store_url(given: object) -> TypeGuard[str]:
    """True for the URL of an object store that can have roots."""
    scheme, found, _ = given.partition("://") if isinstance(given, str) else ("", "", "")
    return bool(found) and scheme.lower() in SCHEMES


def _kind(value: object) -> str:
    """The type of a value that may be secret."""
    return f"a value of type {type(value).__qualname__}"


def shown_url(url: str) -> str:
    """A URL in a message. Left out: its query, and what is before an ``@``, which may be secret."""
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/*", url)
    scheme = found[0] if found else ""
    # A password may have any sign in it.
    rest = url[len(scheme) :].rpartition("@")[2]
    shown = scheme + re.split("[?#]", rest, maxsplit=1)[0]
    return f"{shown!r:.120}"


def url_of(given: str | Store, what: str) -> StoreUrl:
    """Returns the location of a URL or of a :class:`Store`."""
    store = given if isinstance(given, Store) else Store(_checked_url(given, what))
    profile = None
    if store.url.startswith("s3://") and store.credentials is None and not store.anonymous:
        profile = store.profile or _default_profile()
    elif store.profile is not None:
        raise MisuseError(f"profile= is for S3, and {store.url} is not: leave it out")
    region = store.region
    if region is None and profile is not None and not _any_variable(("AWS_REGION", "AWS_DEFAULT_REGION")):
        region = _profile_values(profile).get("region")
    found = StoreUrl(store.url)
    found.settings = json.dumps(
        {
            "endpoint": store.endpoint,
            "region": region,
            "anonymous": store.anonymous,
            "virtual_hosted": store.virtual_hosted,
            "checksum": store.checksum,
        }
    )
    found.part_bytes = store.part_bytes
    function = store.credentials
    if function is None and profile is not None:
        function = _of_profile(profile)
    found.credentials = None if function is None else _asked(_hashable(function))
    return found


def _checked_url(url: object, what: str) -> str:
    """Returns a URL with the usual scheme and without a slash at its end."""
    if not is_store_url(url):
        given = f"str {shown_url(url)}" if isinstance(url, str) else _kind(url)
        raise MisuseError(
            f"{what} is {given}: pass a URL of an object store, as s3://bucket/run "
            f"({', '.join(f'{scheme}://' for scheme in SCHEMES)})"
        )
    scheme, _, rest = url.partition("://")
    parts = rest.rstrip("/").split("/")
    user, at, _ = parts[0].rpartition("@")
    is_container = at and ":" not in user and SCHEMES[scheme.lower()].startswith("abfs")
    if (at and not is_container) or any("@" in part for part in parts[1:]):
        raise MisuseError(
            f"{what} has an @, and what is before it may be a password: leave it out, and pass credentials= to sw.Store"
        )
    if strange := [sign for sign in rest if sign in "?#%*\\" or ord(sign) < 32 or sign == "\x7f"]:
        raise MisuseError(
            f"{what} is {shown_url(url)}. Names in a store must not contain {strange[0]!r} here: rename it"
        )
    if len(parts) < 2 or not all(parts) or any(part in (".", "..") for part in parts):
        raise MisuseError(
            f"{what} is {url!r:.120}; pass a bucket and a name in it, as {scheme.lower()}://bucket/run"
        )
    if ".stepwell" in parts:
        above = "/".join(parts[: parts.index(".stepwell")])
        raise MisuseError(
            f"{what} is in the control directory of a root: pass the root, {scheme.lower()}://{above}"
        )
    return f"{SCHEMES[scheme.lower()]}://{'/'.join(parts)}"


def _any_variable(names: tuple[str, ...]) -> bool:
    return any(os.environ.get(name) for name in names)


def _default_profile() -> str | None:
    """The profile of ``AWS_PROFILE``, or the default one if nothing else gives credentials. Keys in
    variables count before a profile in one, as for the clients of AWS."""
    if _any_variable(("AWS_ACCESS_KEY_ID",)):
        return None
    if named := os.environ.get("AWS_PROFILE"):
        return named
    if _any_variable(_WITHOUT_PROFILE):
        return None
    return "default" if _profile_values("default").keys() & _OF_CREDENTIALS else None


def _profile_values(profile: str) -> dict[str, str]:
    """The values of a profile in the shared files of AWS."""
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(os.path.expanduser(os.environ.get(variable) or file), encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError) as error:
            # The message of the parser has lines of the file.
            raise MisuseError(f"{file} of AWS cannot be read ({type(error).__name__})") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    return found


@functools.lru_cache(maxsize=16)
def _of_profile(profile: str) -> CredentialFunction:
    """The credentials of a profile: by boto3, or keys that the shared files have."""

    def keys() -> CredentialValues:
        values = _profile_values(profile)
        if "aws_access_key_id" not in values or "aws_secret_access_key" not in values:
            raise MisuseError(
                f"the profile {profile!r} of AWS has no keys in the shared files. For SSO, roles and processes install boto3"
            )
        return {
            "access_key_id": values["aws_access_key_id"],
            "secret_access_key": values["aws_secret_access_key"],
            "token": values.get("aws_session_token"),
        }

    if importlib.util.find_spec("boto3") is None:
        return keys
    _session(profile)  # an unknown profile is refused at once

    def by_boto3() -> CredentialValues:
        from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
            BotoCoreError,
            ClientError,
        )

        try:
            # A session keeps the keys that it has read, and they may have been replaced since.
            given = _session(profile).get_credentials()
            frozen = None if given is None else given.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            # Its message may have the output of a process that gives keys.
            response = getattr(error, "response", {})
            code = response.get("Error", {}).get("Code", type(error).__name__)
            raise MisuseError(
                f"the profile {profile!r} of AWS gave no credentials ({code}): log in again, as by "
                f"`aws sso login --profile {profile}`, or check its role or process"
            ) from None
        if frozen is None:
            raise MisuseError(
                f"the profile {profile!r} of AWS has no credentials: log in, or name another profile"
            )
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
        }

    return by_boto3


def _session(profile: str) -> boto3.Session:
    """A session of boto3."""
    import boto3
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped, unused-ignore]

    try:
        return boto3.Session(profile_name=profile)
    except BotoCoreError as error:
        raise MisuseError(
            f"the profile {profile!r} of AWS cannot be used ({type(error).__name__}): "
            "name one of `aws configure list-profiles`"
        ) from None


class _ByIdentity:
    """A function that has no hash, such as an object with ``__call__`` and ``__eq__``."""

    def __init__(self, function: CredentialFunction) -> None:
        self._function = function

    def __call__(self) -> CredentialValues:
        return self._function()

    def __hash__(self) -> int:
        return id(self._function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other._function is self._function


def _hashable(function: CredentialFunction) -> CredentialFunction:
    return function if isinstance(function, Hashable) else _ByIdentity(function)


@functools.lru_cache(maxsize=64)
def _asked(function: CredentialFunction) -> object:
    """The engine's side of a function that gives credentials. A thread calls the function."""
    from . import _core

    credentials = _core.Credentials()

    def run() -> None:
        while True:
            credentials.wait()
            try:
                parts, seconds = _parts_of(function())
            except BaseException as error:  # passed on to the request that wants them
                what = "" if isinstance(error, StepwellError) else f"{type(error).__name__}: "
                credentials.fail(f"{what}{error}")
            else:
                credentials.answer(parts, seconds)

    threading.Thread(target=run, name="stepwell-credentials", daemon=True).start()
    return credentials


def _parts_of(given: CredentialValues) -> tuple[dict[str, str], float | None]:
    """Checks what a function of the user has returned. Messages show names only."""
    if not isinstance(given, Mapping):
        raise MisuseError(f"it returned a {type(given).__name__}, and not a dict")
    values = {name: value for name, value in given.items() if value is not None}
    expires = values.pop("expires_at", None)
    parts = {name: value for name, value in values.items() if isinstance(value, str)}
    if unknown := [str(name) for name in values if name not in _PARTS or name not in parts]:
        raise MisuseError(f"{', '.join(unknown)}: it returns strings under {', '.join(_PARTS)}")
    if expires is None:
        return parts, None
    if not isinstance(expires, datetime.datetime) or expires.tzinfo is None:
        raise MisuseError("expires_at is a datetime with a time zone")
    return parts, (expires - datetime.datetime.now(datetime.UTC)).total_seconds()
