"""Buckets that are written to: a path in one, and its objects as bytes.

Credentials, region and endpoint come from the environment, under the names that the provider's own tools use. A request
that fails on the way, or that the bucket answers with 5xx, is retried for a while. Every function raises a one-line
`UsageError` if the bucket cannot be reached or refuses.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, BinaryIO, Concatenate, ParamSpec, TypeVar, cast

from tracefit.errors import UsageError
from tracefit.inputs.endpoints import named_endpoint
from tracefit.inputs.files import shown_url, split_url, unknown_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from obstore import PutMode, UpdateVersion
    from obstore.store import ObjectStore, S3Config

_MAX_REQUESTS = 8
"""Most requests to a bucket at a time: a small request is little more than a round trip."""

FIRST_ANSWER_S = 20
"""How long a bucket that has never answered is retried: as long as the buckets that are only read."""

PATIENCE_S = 180
"""How long a bucket that has answered before is retried."""

_RETRY_PAUSE_S = 0.2
_MAX_FILE_BYTES = 64 << 20
_REASON_CHARS = 200
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}

_IMPORTING = threading.Lock()

_ANSWERED: set[str] = set()
"""Buckets that have answered this process: requests to them are retried for `PATIENCE_S`."""

_P = ParamSpec("_P")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def location_of(path: str | os.PathLike[str]) -> Path:
    """Return what a path or a URL names: a path on disk, or a `BucketPath`.

    Raises:
        UsageError: The URL is of another kind, names no bucket, or holds credentials or options.
    """
    # No URL begins with a slash. Thousands of runs have a file of settings each.
    if isinstance(path, BucketPath) or (isinstance(path, Path) and path.root):
        return path
    scheme, rest = split_url(os.fspath(path))
    if scheme == "file":
        return Path(rest)
    if scheme not in _ENVIRONMENT:
        raise unknown_url(scheme, rest)
    rest = rest.strip("/")
    bucket = rest.partition("/")[0]
    if not bucket or "?" in rest or re.search("[@:]", bucket):
        raise UsageError(
            "credentials and options do not belong in this URL" if bucket.strip("?@:") else "names no bucket",
            where=shown_url(scheme, rest),
            hint=f"{scheme}://BUCKET/FOLDER; all else is read from the environment: {_ENVIRONMENT[scheme]}",
        )
    return BucketPath(f"{scheme}:/{rest}")


class BucketPath(PosixPath):
    """The name of an object or of a prefix in a bucket; it prints as its URL.

    It has the methods that a folder of results needs. Any other use as a file raises `UsageError`: the disk
    is not touched.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the URL."""
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        """Refuse to be a path on disk.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "is in a bucket", where=str(self), hint="here a folder or file on disk is needed; copy it there"
        )

    @property
    def bucket(self) -> str:
        """The URL of the bucket, without the name in it."""
        return f"{self.parts[0]}//{self.parts[1]}"

    @property
    def key(self) -> str:
        """The name in the bucket."""
        return "/".join(self.parts[2:])

    def is_file(self) -> bool:
        """Say whether it is an object."""
        return size_of(self) is not None

    def is_dir(self) -> bool:
        """Say whether objects lie below it."""
        return bool(children(self))

    def exists(self) -> bool:
        """Say whether it is an object, or objects lie below it."""
        return self.is_file() or self.is_dir()

    def open(self, *_: object, **__: object) -> BinaryIO:  # type: ignore[override] # only for reading bytes
        """Open a small object for reading.

        Raises:
            FileNotFoundError: It is not there.
            UsageError: It is larger than any file of results.
        """
        return io.BytesIO(get(self, limit_bytes=_MAX_FILE_BYTES)[0])


class _BrokenOffError(UsageError):
    """A connection ended before its answer did."""


def _request(
    work: Callable[Concatenate[ObjectStore, BucketPath, _P], _Result],
) -> Callable[Concatenate[BucketPath, _P], _Result]:
    """Hand a request the client of its bucket, raise errors as one line, and repeat it if its answer breaks off.

    The library itself does not repeat a request that was answered in part.
    """

    @wraps(work)
    def made(path: BucketPath, /, *arguments: _P.args, **options: _P.kwargs) -> _Result:
        began = time.monotonic()
        while True:
            try:
                with _errors_of(path):
                    patience_s = PATIENCE_S if path.bucket in _ANSWERED else FIRST_ANSWER_S
                    return work(_client_of(path, patience_s), path, *arguments, **options)
            except _BrokenOffError:
                if time.monotonic() - began > FIRST_ANSWER_S:
                    raise
            time.sleep(_RETRY_PAUSE_S)

    return made


Version = dict[str, str]
"""The version of an object as its bucket reports it, for `put_if`."""


@_request
def get(store: ObjectStore, path: BucketPath, *, limit_bytes: int | None = None) -> tuple[bytes, Version]:
    """Return an object and its version.

    Raises:
        FileNotFoundError: It is not there.
        UsageError: The object is larger than the limit.
    """
    response = store.get(path.key)
    if limit_bytes is not None and response.meta["size"] > limit_bytes:
        raise UsageError(f"is larger than {limit_bytes:,} bytes", where=str(path))
    about = {name: response.meta.get(name) for name in ("e_tag", "version")}
    return bytes(response.bytes()), {name: str(value) for name, value in about.items() if value}


@_request
def download(store: ObjectStore, path: BucketPath, target: Path) -> None:
    """Copy an object to disk, piece by piece.

    Raises:
        FileNotFoundError: It is not there.
    """
    with target.open("wb") as copy:
        for piece in store.get(path.key).stream(min_chunk_size=1 << 20):
            copy.write(piece)


@_request
def put(store: ObjectStore, path: BucketPath, data: Path | bytes) -> None:
    """Write an object; it appears whole or not at all."""
    store.put(path.key, data)


def put_if(path: BucketPath, data: bytes, version: Version | None) -> bool:
    """Write an object if its version is still the given one (null: missing); return whether it was written.

    Raises:
        UsageError: The bucket refuses, or no answer came: it may have been written.
    """
    with _errors_of(path):
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        mode: PutMode = "create" if version is None else cast("UpdateVersion", version)
        try:
            # The caller reads the newer version and tries again, so this call need not retry.
            _client_of(path, FIRST_ANSWER_S).put(path.key, data, mode=mode)
        except (AlreadyExistsError, PreconditionError):
            return False
    return True


@_request
def size_of(store: ObjectStore, path: BucketPath) -> int | None:
    """Return the bytes of an object; null if it is not there."""
    try:
        return store.head(path.key)["size"]
    except FileNotFoundError:
        return None


@_request
def children(store: ObjectStore, path: BucketPath) -> set[str]:
    """Return the names directly below a prefix, of objects and of prefixes."""
    listing = store.list_with_delimiter(path.key)
    names = [*listing["common_prefixes"], *(o["path"] for o in listing["objects"])]
    return {name.rstrip("/").rpartition("/")[2] for name in names}


@_request
def below(store: ObjectStore, path: BucketPath) -> list[tuple[str, int, datetime]]:
    """Return name, size and time of writing of every object below a prefix; names are relative to it."""
    return [
        (one["path"].removeprefix(path.key).lstrip("/"), one["size"], one["last_modified"])
        for page in store.list(path.key)
        for one in page
    ]


def delete(paths: Sequence[BucketPath]) -> None:
    """Remove objects of one bucket, there or not."""
    if paths:
        _delete(paths[0], [path.key for path in paths])


@_request
def _delete(store: ObjectStore, _: BucketPath, keys: list[str]) -> None:
    store.delete(keys)


def map_concurrently(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Do some work on each item, several at a time, because it mostly waits for the bucket."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - a folder on disk needs none

    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(work, items))


def _client_of(path: BucketPath, seconds: int) -> ObjectStore:
    """Return the client of a bucket, at the endpoint that the environment names now."""
    return _opened(path.bucket, seconds, named_endpoint("s3"))


@cache  # a client keeps its connections open for the next request
def _opened(bucket: str, seconds: int, endpoint: str | None) -> ObjectStore:
    from obstore.store import from_url  # noqa: PLC0415

    # As in the provider's tools, an http:// scheme allows plain HTTP.
    plain = endpoint is not None and endpoint.startswith("http://")
    named: S3Config = {"endpoint": endpoint} if endpoint and bucket.startswith("s3:") else {}
    return from_url(
        bucket,
        config=named,
        client_options={"allow_http": True} if plain else None,
        retry_config={
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=seconds),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)},
        },
    )


@contextmanager
def _errors_of(path: BucketPath) -> Iterator[None]:
    """Raise errors of a bucket as one line, and FileNotFoundError for a missing object."""
    try:
        # Of threads that import parts of a package at the same time, one may go on with a part that is not ready.
        with _IMPORTING:
            import obstore.store  # noqa: F401, PLC0415
            from obstore.exceptions import BaseError  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            "tables and results in a bucket need obstore",
            where=str(path),
            hint="pip install 'tracefit[buckets]'",
        ) from error
    try:
        yield
        _ANSWERED.add(path.bucket)
    except FileNotFoundError as error:
        if re.search("NoSuchBucket|bucket does not exist", str(error)):
            raise _refused(path, "there is no such bucket") from error
        error.filename = str(path)
        raise
    except (BaseError, ValueError) as error:
        broken = "HTTP error" in str(error)  # what the library calls a response without a status
        raise _refused(path, _reason(error), _BrokenOffError if broken else UsageError) from error


def _reason(error: Exception) -> str:
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if code:
        return code[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].partition(" error: ")[2][:_REASON_CHARS] or lines[0] if lines else type(error).__name__


def _refused(path: BucketPath, reason: str, kind: type[UsageError] = UsageError) -> UsageError:
    scheme = path.parts[0].rstrip(":")
    return kind(
        f"cannot be read or written ({reason})",
        where=str(path),
        hint=f"check the URL, and {_ENVIRONMENT[scheme]} in the environment",
    )
