"""Object stores: expand an `s3://` or `gs://` URL into files, and copy remote files to disk.

Credentials and options of a URL go to the store and never into a name that is shown.
"""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.inputs.files import TraceFile, display_name, reason_of
from tracefit.inputs.folders import Folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyarrow.fs import FileInfo, FileSystem

FileSystemOf = Callable[[str], tuple["FileSystem", str]]
"""Takes the URL of a bucket, credentials and options included; returns its file system and the path in that."""

_AT_ONCE = 8
"""Files fetched at a time: a small one takes little more than a round trip."""

_SECONDS_TO_GIVE_UP = 20
"""Google's client retries for a quarter of an hour by default."""

_GLOB = re.compile(r"[*\[]")  # a question mark begins the options of a URL
_GLOB_PART = re.compile(r"\*\*/|\*\*|\*|\[[^]/]+\]")
_GLOB_MEANS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}


@dataclass(frozen=True, slots=True)
class Fetched:
    """A copy of a file on disk, under the file's own name, and the SHA-256 of its bytes in hex."""

    file: TraceFile
    content_hash: str


def open_filesystem(url: str) -> tuple[FileSystem, str]:
    """Open an object store as pyarrow does, with the credentials of the environment; see `FileSystemOf`."""
    from pyarrow.fs import FileSystem  # noqa: PLC0415 - its clients of object stores take long to load

    if url.startswith("gs://"):
        url += f"{'&' if '?' in url else '?'}retry_limit_seconds={_SECONDS_TO_GIVE_UP}"
    filesystem, path = FileSystem.from_uri(url)
    return filesystem, path


def find_remote(scheme: str, rest: str, filesystem_of: FileSystemOf) -> list[TraceFile | Folder]:
    """Return the files and folders that a URL matches; `rest` is the URL after `scheme://`.

    Raises:
        UsageError: If nothing matches, or the store refuses access.
    """
    plain, question, options = rest.partition("?")
    location, _, key = plain.partition("/")
    bucket = f"{scheme}://{location.rpartition('@')[2]}"  # credentials stand before an @
    key = key.strip("/")
    try:
        return _find(bucket, key, *filesystem_of(f"{scheme}://{location}/{question}{options}"))
    except (OSError, ValueError) as error:  # pyarrow's own errors are one of the two
        reason = reason_of(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise UsageError(
            f"cannot be read ({reason})",
            where=f"{bucket}/{key}",
            hint="check the URL, and the credentials of this environment",
        ) from error


def fetch(
    files: Iterable[TraceFile], folder: Path, on_read: Callable[[int], object] | None = None
) -> list[Fetched]:
    """Copy remote files to disk; each is read once.

    Args:
        files: The files.
        folder: Where to put the copies.
        on_read: Receives the number of bytes read, from one thread at a time.

    Returns:
        The copies, in the order of the files.

    Raises:
        UsageError: A file cannot be read.
        OSError: A copy cannot be written.
    """
    lock = threading.Lock()

    def report(size: int) -> None:
        with lock:
            if on_read:
                on_read(size)

    def fetch_one(file: TraceFile) -> Fetched:
        target, digest, size = folder / uuid.uuid4().hex, hashlib.sha256(), 0
        with file.open(on_read=report) as stream, target.open("wb") as copy:
            while piece := stream.read(1 << 20):
                copy.write(piece)
                digest.update(piece)
                size += len(piece)
        return Fetched(replace(file, path=str(target), size=size, filesystem=None), digest.hexdigest())

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(fetch_one, files))


def _find(bucket: str, key: str, filesystem: FileSystem, base: str) -> list[TraceFile | Folder]:
    from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415

    base = base.rstrip("/")
    pattern = _GLOB.search(key)
    # A store lists by prefix and knows no patterns: list the folder above the first wildcard, and match here.
    folder = key[: pattern.start()].rpartition("/")[0] if pattern else key
    info = filesystem.get_file_info("/".join(filter(None, (base, folder))))

    def file_of(info: FileInfo) -> TraceFile:
        name = f"{bucket}/{info.path.removeprefix(base).lstrip('/')}"
        return TraceFile(display_name(name), info.path, info.size, info.mtime_ns, filesystem)

    if info.type == FileType.NotFound:
        raise UsageError("no such file or folder", where=f"{bucket}/{key}")
    if info.type == FileType.File:
        return [file_of(info)]
    below = filesystem.get_file_info(FileSelector(info.path, recursive=True))
    files = sorted((file_of(i) for i in below if i.type == FileType.File), key=lambda file: file.name)
    return _matching(bucket, key, files) if pattern else [_folder(f"{bucket}/{key}".rstrip("/"), files)]


def _folder(name: str, files: list[TraceFile]) -> Folder:
    below = [(tuple(f.name.removeprefix(name).strip("/").split("/")), f) for f in files]
    visible = tuple(item for item in below if not any(part.startswith(".") for part in item[0]))
    return Folder(name, tuple(name.partition("://")[2].split("/")), visible)


def _matching(bucket: str, key: str, files: list[TraceFile]) -> list[TraceFile | Folder]:
    """Return the files that match a pattern, and the folders that match it, with all their files."""
    pattern = re.compile(re.escape(f"{bucket}/") + _regex_of(key))
    found: dict[str, list[TraceFile]] = {}
    for file in files:
        ends = [m.start() for m in re.finditer("/", file.name)][3:]
        ways = [file.name[:end] for end in ends] + [file.name]
        if matched := next((way for way in ways if pattern.fullmatch(way)), None):
            found.setdefault(matched, []).append(file)
    if not found:
        raise UsageError("matches no file or folder", where=f"{bucket}/{key}")
    return [inside[0] if inside[0].name == name else _folder(name, inside) for name, inside in found.items()]


def _regex_of(pattern: str) -> str:
    parts, position = [], 0
    for special in _GLOB_PART.finditer(pattern):
        parts.append(re.escape(pattern[position : special.start()]))
        parts.append(_GLOB_MEANS.get(special[0]) or special[0].replace("[!", "[^", 1).replace("\\", r"\\"))
        position = special.end()
    return "".join([*parts, re.escape(pattern[position:])])
