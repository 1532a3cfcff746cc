"""Find the files and folders that a path, a pattern or a URL matches, on disk and in object stores.

Credentials and options of a URL go to the store and never into a name that is shown.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tracefit.errors import UsageError
from tracefit.inputs.endpoints import endpoint_of, location_at
from tracefit.inputs.files import TraceFile, cannot_open, canonical, display_name, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyarrow.fs import FileInfo, FileSystem

FolderParts = tuple[str, ...]
"""The path of a folder: the names of the folders above it and its own."""

FileSystemOf = Callable[[str], tuple["FileSystem", str]]
"""Takes the URL of a bucket, credentials and options included; returns its file system and the path within it."""

RUN_CONFIG_NAMES = ("exp-config.yaml", "run.yaml")
MODEL_CONFIG_NAME = "config.json"
CONFIG_NAMES = (*RUN_CONFIG_NAMES, MODEL_CONFIG_NAME)

_SECONDS_TO_GIVE_UP = 20
"""Google's client retries for a quarter of an hour by default."""

_LOCAL_GLOB = re.compile(r"[*?\[]")
_REMOTE_GLOB = re.compile(r"[*\[]")  # a question mark begins the options of a URL
_GLOB_PART = re.compile(r"\*\*/|\*\*|\*|\[[^]/]+\]")
_GLOB_MEANS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}


def clean_run_id(name: str) -> str:
    """Return `name` reduced to letters, digits, dot, underscore and dash; never empty, never a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:120] or "run"


class Folder(msgspec.Struct, frozen=True):
    """A folder, local or remote, and all files below it.

    Attributes:
        name: The name shown to the user.
        parts: The names of the folders above it and its own; runs are named after them.
        files: Each file with its path below this folder, in parts; sorted, without hidden ones.
        irregular: Names that are not regular files, such as pipes and broken links.
        locations: The location of this folder and, on disk, of each one below it; see `TraceFile.location`.
    """

    name: str
    parts: FolderParts
    files: tuple[tuple[FolderParts, TraceFile], ...]
    irregular: tuple[str, ...] = ()
    locations: Mapping[FolderParts, str] = msgspec.field(default_factory=dict)

    def location_of(self, below: FolderParts) -> str:
        """Return the location of a folder, given by its path below this one."""
        return self.locations.get(below) or "/".join([self.locations[()], *below])


def find_local(path: str) -> list[TraceFile | Folder]:
    """Return the files and folders that match a path or pattern, sorted by name.

    Raises:
        UsageError: If nothing matches, or the match may not be read.
    """
    if not path or "\0" in path:
        raise UsageError("is not a path", where=repr(path))
    if not _LOCAL_GLOB.search(path) or os.path.lexists(path):
        return [_find_one(path)]
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - keeps the user's spelling
    if not matches:
        raise UsageError("matches no file or folder", where=display_name(path))
    return [_find_one(match) for match in matches]


def _find_one(path: str) -> TraceFile | Folder:
    try:
        is_folder = stat.S_ISDIR(Path(path).stat().st_mode)
    except FileNotFoundError as error:
        raise UsageError("no such file or folder", where=display_name(path)) from error
    except OSError as error:
        raise cannot_open(display_name(path), error) from error
    if not is_folder:
        return TraceFile.local(path)
    files, irregular = [], []
    locations: dict[FolderParts, str] = {}
    for parts, each in _walk(path, locations):
        if os.path.isfile(each):  # noqa: PTH113 - of strings: a fleet has thousands of files
            location = canonical(each) if _is_link(each) else f"{locations[parts[:-1]].rstrip('/')}/{parts[-1]}"
            files.append((parts, TraceFile.local(each, location=location)))
        else:
            irregular.append(display_name(each))
    return Folder(
        display_name(path),
        tuple(filter(None, locations[()].split("/"))),
        tuple(files),
        tuple(irregular),
        locations,
    )


def _is_link(path: str) -> bool:
    return os.path.islink(path)  # noqa: PTH114 - of strings


def _walk(root: str, locations: dict[FolderParts, str]) -> Iterator[tuple[FolderParts, str]]:
    """Yield all non-folders below a folder, and set the locations of folders.

    Links are followed, and each folder is entered once, so that loops end.
    """
    entered: set[tuple[int, int]] = set()
    root = str(Path(root))
    for folder, below, names in os.walk(root, followlinks=True, onerror=_refuse_folder):
        status = os.stat(folder)  # noqa: PTH116 - of strings: a fleet has thousands of folders
        if (status.st_dev, status.st_ino) in entered:
            below.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        below[:] = sorted(name for name in below if not name.startswith("."))
        inside = tuple(map(display_name, filter(None, folder.removeprefix(root).split("/"))))
        is_known = inside and not _is_link(folder)
        locations[inside] = f"{locations[inside[:-1]].rstrip('/')}/{inside[-1]}" if is_known else canonical(folder)
        for name in sorted(name for name in names if not name.startswith(".")):
            each = os.path.join(folder, name)  # noqa: PTH118
            yield (*inside, display_name(name)), each.removeprefix("./")


def _refuse_folder(error: OSError) -> None:
    raise UsageError(
        f"cannot be listed ({reason_of(error)})",
        where=display_name(str(error.filename)),
        hint="check its permissions, or name the files to read",
    ) from error


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
    if ":" in location and "@" not in location:
        raise UsageError(
            "names no bucket", where=f"{scheme}://", hint="a slash in a secret key is written as %2F in a URL"
        )
    bucket = f"{scheme}://{location.rpartition('@')[2]}"  # credentials stand before an @
    key = "/".join(filter(None, key.split("/")))  # two slashes name the same object as one
    try:
        endpoint = endpoint_of(scheme, options)
        return _find_in(bucket, key, endpoint, *filesystem_of(f"{scheme}://{location}/{question}{options}"))
    except (OSError, ValueError) as error:  # pyarrow's own errors are one of the two
        reason = reason_of(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise UsageError(
            f"cannot be read ({reason})",
            where=f"{bucket}/{key}",
            hint="check the URL, and the credentials of this environment",
        ) from error


def _find_in(
    bucket: str, key: str, endpoint: str | None, filesystem: FileSystem, base: str
) -> list[TraceFile | Folder]:
    from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415

    base = base.rstrip("/")
    pattern = _REMOTE_GLOB.search(key)
    # A store lists by prefix and knows no patterns: list the folder above the first wildcard, and match here.
    folder = key[: pattern.start()].rpartition("/")[0] if pattern else key
    info = filesystem.get_file_info("/".join(filter(None, (base, folder))))

    def file_of(info: FileInfo) -> TraceFile:
        name = display_name(f"{bucket}/{info.path.removeprefix(base).lstrip('/')}")
        return TraceFile(name, info.path, info.size, info.mtime_ns, filesystem, location=location_at(endpoint, name))

    if info.type == FileType.NotFound:
        raise UsageError("no such file or folder", where=f"{bucket}/{key}")
    if info.type == FileType.File:
        return [file_of(info)]
    below = filesystem.get_file_info(FileSelector(info.path, recursive=True))
    files = sorted((file_of(i) for i in below if i.type == FileType.File), key=lambda file: file.name)
    if pattern:
        return _matching(bucket, key, endpoint, files)
    return [_remote_folder(f"{bucket}/{key}".rstrip("/"), endpoint, files)]


def _remote_folder(name: str, endpoint: str | None, files: list[TraceFile]) -> Folder:
    below = [(tuple(f.name.removeprefix(name).strip("/").split("/")), f) for f in files]
    visible = tuple(item for item in below if not any(part.startswith(".") for part in item[0]))
    # Without the colon, so that a folder never has the location of an object.
    location = location_at(endpoint, name).replace("://", "/", 1)
    return Folder(name, tuple(name.partition("://")[2].split("/")), visible, locations={(): location})


def _matching(bucket: str, key: str, endpoint: str | None, files: list[TraceFile]) -> list[TraceFile | Folder]:
    """Return the files that match a pattern, and the folders that match it, with all their files."""
    # Each special part has its regular expression; the text between two of them stands for itself.
    texts, specials = _GLOB_PART.split(key), _GLOB_PART.findall(key)
    means = [_GLOB_MEANS.get(s) or s.replace("[!", "[^", 1).replace("\\", r"\\") for s in specials]
    parts = [re.escape(text) + mean for text, mean in zip(texts, [*means, ""], strict=True)]
    pattern = re.compile(re.escape(f"{bucket}/") + "".join(parts))
    by_name: dict[str, list[TraceFile]] = {}
    for file in files:
        # A pattern may match the file, or a folder above it.
        ends = [m.start() for m in re.finditer("/", file.name)][3:]
        ways = [file.name[:end] for end in ends] + [file.name]
        if matched := next((way for way in ways if pattern.fullmatch(way)), None):
            by_name.setdefault(matched, []).append(file)
    if not by_name:
        raise UsageError("matches no file or folder", where=f"{bucket}/{key}")
    return [
        inside[0] if inside[0].name == name else _remote_folder(name, endpoint, inside)
        for name, inside in by_name.items()
    ]
