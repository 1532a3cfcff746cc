"""Buckets that are written to: a path in one, and its objects as bytes.

What is not known before is read from the environment: credentials, region, endpoint, in the names that the provider's own
tools use. A request that fails on the way, or that the bucket answers with 5xx, is tried again for a while.
"""

from __future__ import annotations

import io
import os
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, BinaryIO, ParamSpec, TypeVar, cast
from urllib.parse import unquote

from tracefit.errors import UsageError
from tracefit.inputs.files import display_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from obstore import PutMode, UpdateVersion
    from obstore.store import ObjectStore

AT_ONCE = 8
"""Requests under way together: a small one is a round trip and little else."""

FIRST_ANSWER_S = 20
"""How long a bucket that never answered is asked again: as long as the buckets that are only read."""

PATIENCE_S = 180
"""How long one that has answered before is asked again."""

_URL = re.compile(r"(?P<scheme>s3|gs|file):/+", re.IGNORECASE)  # a Path makes one slash of two
_PAUSE_S = 0.2
_MAX_FILE_BYTES = 64 << 20
_REASON_CHARS = 200
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}

_P = ParamSpec("_P")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return what a path or a URL names: a path on disk, or a `BucketPath`.

    Raises:
        UsageError: The URL names no bucket, or holds credentials or options.
    """
    if not isinstance(path, Path):
        path = os.fspath(path)
    text = str(path)
    url = _URL.match(text)
    # A local file may be called `s3:` too, and then it is meant.
    if url is None or isinstance(path, BucketPath) or os.path.lexists(text):
        return Path(path) if isinstance(path, str) else path
    scheme, rest = url["scheme"].lower(), text[url.end() :].strip("/")
    if scheme == "file":
        return Path(f"/{unquote(rest.removeprefix('localhost/'))}")
    plain = rest.partition("?")[0]
    user, at, bucket = plain.partition("/")[0].rpartition("@")
    where = display_name(f"{scheme}://{bucket}")
    if not bucket or plain != rest or user or at:
        raise UsageError(
            "names no bucket" if not bucket else "credentials and options do not belong in this URL",
            where=where,
            hint=f"{scheme}://BUCKET/FOLDER; all else is read from the environment: {_ENVIRONMENT[scheme]}",
        )
    return BucketPath(f"{scheme}:/{rest}")


class BucketPath(PosixPath):
    """The name of an object or of a prefix in a bucket; it prints as its URL.

    It has what a folder of results needs. Anything else that is done with files ends in one line: the disk is not touched.
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
        """The URL of the bucket alone."""
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

    def open(self, *_: object, **__: object) -> BinaryIO:  # type: ignore[override] # for reading bytes alone
        """Open a small object for reading.

        Raises:
            FileNotFoundError: It is not there.
            UsageError: It cannot be read, or is larger than any file of results.
        """
        return io.BytesIO(get(self, limit_bytes=_MAX_FILE_BYTES)[0])


class _BrokenOffError(UsageError):
    """A connection ended before its answer did."""


def _again(request: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Make a request again where its answer breaks off: the library begins none anew that was answered in part."""

    @wraps(request)
    def repeated(*arguments: _P.args, **options: _P.kwargs) -> _Result:
        began = time.monotonic()
        while True:
            try:
                return request(*arguments, **options)
            except _BrokenOffError:
                if time.monotonic() - began > FIRST_ANSWER_S:
                    raise
            time.sleep(_PAUSE_S)

    return repeated


Version = dict[str, str]
"""What a bucket says of the state of an object, for `put_if`."""


@_again
def get(path: BucketPath, *, limit_bytes: int | None = None) -> tuple[bytes, Version]:
    """Return an object and its version.

    Raises:
        FileNotFoundError: It is not there.
        UsageError: The bucket cannot be reached, or refuses, or the object is larger than the limit.
    """
    with _told(path):
        import obstore  # noqa: PLC0415

        found = obstore.get(_client(path.bucket), path.key)
        if limit_bytes is not None and found.meta["size"] > limit_bytes:
            raise UsageError(f"is larger than {limit_bytes:,} bytes", where=str(path))
        about = {name: found.meta.get(name) for name in ("e_tag", "version")}
        return bytes(found.bytes()), {name: str(value) for name, value in about.items() if value}


@_again
def download(path: BucketPath, target: Path) -> None:
    """Copy an object to disk, piece by piece.

    Raises:
        FileNotFoundError: It is not there.
        UsageError: The bucket cannot be reached, or refuses.
    """
    with _told(path), target.open("wb") as copy:
        import obstore  # noqa: PLC0415

        for piece in obstore.get(_client(path.bucket), path.key).stream(min_chunk_size=1 << 20):
            copy.write(piece)


@_again
def put(path: BucketPath, data: Path | bytes) -> None:
    """Write an object; it appears whole or not at all.

    Raises:
        UsageError: The bucket cannot be reached, or refuses.
    """
    with _told(path):
        import obstore  # noqa: PLC0415

        obstore.put(_client(path.bucket), path.key, data)


def put_if(path: BucketPath, data: bytes, version: Version | None) -> bool:
    """Write an object if it is still in a state, or not there (null); say whether it was.

    Raises:
        UsageError: The bucket refuses, or no answer came: it may have been written.
    """
    with _told(path):
        import obstore  # noqa: PLC0415
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        try:
            mode: PutMode = "create" if version is None else cast("UpdateVersion", version)
            # The caller looks what is there and tries again: it need not be patient.
            obstore.put(_opened(path.bucket, FIRST_ANSWER_S), path.key, data, mode=mode)
        except (AlreadyExistsError, PreconditionError):
            return False
    return True


@_again
def size_of(path: BucketPath) -> int | None:
    """Return the bytes of an object; null if it is not there.

    Raises:
        UsageError: The bucket cannot be reached, or refuses.
    """
    with _told(path):
        import obstore  # noqa: PLC0415

        try:
            return obstore.head(_client(path.bucket), path.key)["size"]
        except FileNotFoundError:
            return None


@_again
def children(path: BucketPath) -> set[str]:
    """Return the names directly below a prefix, of objects and of prefixes.

    Raises:
        UsageError: The bucket cannot be reached, or refuses.
    """
    with _told(path):
        import obstore  # noqa: PLC0415

        found = obstore.list_with_delimiter(_client(path.bucket), path.key)
        names = [*found["common_prefixes"], *(o["path"] for o in found["objects"])]
        return {name.rstrip("/").rpartition("/")[2] for name in names}


@_again
def below(path: BucketPath) -> list[tuple[str, int, datetime]]:
    """Return name, size and time of writing of every object below a prefix; names are relative to it.

    Raises:
        UsageError: The bucket cannot be reached, or refuses.
    """
    with _told(path):
        import obstore  # noqa: PLC0415

        pages = obstore.list(_client(path.bucket), path.key)
        return [
            (one["path"].removeprefix(path.key).lstrip("/"), one["size"], one["last_modified"])
            for page in pages
            for one in page
        ]


@_again
def delete(paths: Sequence[BucketPath]) -> None:
    """Remove objects of one bucket, there or not.

    Raises:
        UsageError: The bucket cannot be reached, or refuses.
    """
    if paths:
        with _told(paths[0]):
            import obstore  # noqa: PLC0415

            obstore.delete(_client(paths[0].bucket), [path.key for path in paths])


def together(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Do some work on each item, several at a time, for it waits for the bucket."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - a folder on disk needs none

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(work, items))


@cache
def _answered() -> set[str]:
    """Return the buckets that have answered in this process."""
    return set()


def _client(bucket: str) -> ObjectStore:
    return _opened(bucket, PATIENCE_S if bucket in _answered() else FIRST_ANSWER_S)


@cache
def _opened(bucket: str, seconds: int) -> ObjectStore:
    from obstore.store import from_url  # noqa: PLC0415

    # An endpoint is named as the provider's tools name it, and there a scheme is enough to allow it.
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return from_url(
        bucket,
        client_options={"allow_http": True} if plain else None,
        retry_config={
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=seconds),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)},
        },
    )


@contextmanager
def _told(path: BucketPath) -> Iterator[None]:
    """Raise errors of a bucket as one line; an object that is not there as FileNotFoundError.

    Raises:
        UsageError: The bucket cannot be reached or refuses, or the library for buckets is not installed.
    """
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            "tables and results in a bucket need obstore",
            where=str(path),
            hint="pip install 'tracefit[buckets]'",
        ) from error
    try:
        yield
        _answered().add(path.bucket)
    except FileNotFoundError as error:
        if re.search("NoSuchBucket|bucket does not exist", str(error)):
            raise _refused(path, "there is no such bucket") from error
        error.filename = str(path)
        raise
    except (BaseError, ValueError) as error:
        broken = "HTTP error" in str(error)  # as the library calls what is no answer with a status
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
