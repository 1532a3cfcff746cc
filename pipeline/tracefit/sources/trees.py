"""Paths, globs and URLs to files and to folders with all that is below them."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyarrow.fs import FileSelector, FileSystem, FileType

from tracefit.errors import UsageError
from tracefit.sources.files import TraceFile, cannot_open, reason_of, shown

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

FileSystemOf = Callable[[str], tuple[FileSystem, str]]
"""From the URL of a bucket, with whatever credentials and options it has, to its file system and the path in that."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+")
"""One slash is enough: `pathlib` takes the second away."""

_GLOB = re.compile(r"[*?\[]")
_URL_GLOB = re.compile(r"[*\[]")  # a question mark begins the options of a URL
_GLOB_PART = re.compile(r"\*\*/|\*\*|\*|\[[^]/]+\]")
_GLOB_MEANS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}

_SECONDS_TO_GIVE_UP = 20
"""Google's client retries for a quarter of an hour unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A file below a folder: `parts` are the folders on the way to it and its own name."""

    parts: tuple[str, ...]
    file: TraceFile


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder and all files below it.

    Attributes:
        name: What the user knows the folder by.
        parts: The names of the folders above it and its own, for a run to be named after.
        leaves: The files, sorted by where they are, without hidden ones.
        irregular: What has a name but is no file, such as a pipe or a link to nothing.
    """

    name: str
    parts: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    irregular: tuple[str, ...] = ()


def files_and_trees(path: str, filesystem_of: FileSystemOf) -> list[TraceFile | Tree]:
    """Find what a path, a pattern or a URL stands for.

    Args:
        path: A file, a folder, a pattern of either, or an `s3://`, `gs://` or `file://` URL of one of these.
        filesystem_of: Opens object stores.

    Returns:
        Files and folders, in the order of their names.

    Raises:
        UsageError: If there is nothing, or nothing that may be read.
    """
    url = _URL.match(path)
    if url is None or _exists(path):
        return _local(path)
    scheme, rest = url["scheme"].lower(), path[url.end() :]
    if scheme == "file":
        return _local(unquote(f"/{rest.removeprefix('localhost/')}"))
    if scheme not in ("s3", "gs"):
        raise UsageError("is a URL of no known kind", where=path, hint="s3://, gs:// and file:// are read")
    return _Bucket.of(scheme, rest, filesystem_of).find()


def open_filesystem(url: str) -> tuple[FileSystem, str]:
    """Open an object store as pyarrow does, with the credentials of the environment; see `FileSystemOf`."""
    if url.startswith("gs://"):
        url += f"{'&' if '?' in url else '?'}retry_limit_seconds={_SECONDS_TO_GIVE_UP}"
    filesystem, path = FileSystem.from_uri(url)
    return filesystem, path


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _local(path: str) -> list[TraceFile | Tree]:
    if not path or "\0" in path:
        raise UsageError("is not a path", where=repr(path))
    if _GLOB.search(path) and not os.path.lexists(path):
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - keeps the user's spelling
        if not matches:
            raise UsageError("matches no file or folder", where=shown(path))
        return [_local_item(match) for match in matches]
    return [_local_item(path)]


def _local_item(path: str) -> TraceFile | Tree:
    try:
        is_folder = stat.S_ISDIR(Path(path).stat().st_mode)
    except FileNotFoundError as error:
        raise UsageError("no such file or folder", where=shown(path)) from error
    except OSError as error:
        raise cannot_open(shown(path), error) from error
    return _local_tree(path) if is_folder else TraceFile.local(path)


def _local_tree(root: str) -> Tree:
    leaves, irregular = [], []
    for parts, path in _walk(root):
        if Path(path).is_file():
            leaves.append(Leaf(parts, TraceFile.local(path)))
        else:
            irregular.append(shown(path))
    folders = tuple(shown(part) for part in Path(root).resolve().parts[1:])
    return Tree(shown(root), folders, tuple(leaves), tuple(irregular))


def _walk(root: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is below a folder and is no folder. Links are followed; each folder is entered once."""
    entered: set[tuple[int, int]] = set()
    for folder, below, names in os.walk(root, followlinks=True, onerror=_refuse_folder):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            below.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        below[:] = sorted(name for name in below if not name.startswith("."))
        inside = Path(folder).relative_to(root).parts
        for name in sorted(name for name in names if not name.startswith(".")):
            yield tuple(shown(part) for part in (*inside, name)), str(Path(folder, name))


def _refuse_folder(error: OSError) -> None:
    raise UsageError(
        f"cannot be listed ({reason_of(error)})",
        where=shown(str(error.filename)),
        hint="check its permissions, or name the files to read",
    ) from error


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A URL of an object store: the bucket, the key or pattern in it, and how to open it."""

    name: str
    key: str
    url: str
    filesystem_of: FileSystemOf

    @classmethod
    def of(cls, scheme: str, rest: str, filesystem_of: FileSystemOf) -> _Bucket:
        plain, question, options = rest.partition("?")
        location, _, key = plain.partition("/")
        name = f"{scheme}://{location.rpartition('@')[2]}"  # what is before an @ is secret
        return cls(name, key.strip("/"), f"{scheme}://{location}/{question}{options}", filesystem_of)

    @property
    def whole_name(self) -> str:
        return f"{self.name}/{self.key}"

    def find(self) -> list[TraceFile | Tree]:
        try:
            return self._find()
        except (OSError, ValueError) as error:  # pyarrow's own errors are one of the two
            reason = reason_of(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise UsageError(
                f"cannot be read ({reason})",
                where=self.whole_name,
                hint="check the URL, and the credentials of this environment",
            ) from error

    def _find(self) -> list[TraceFile | Tree]:
        filesystem, base = self.filesystem_of(self.url)
        base = base.rstrip("/")
        pattern = _URL_GLOB.search(self.key)
        # A store can list what begins alike; patterns it does not know.
        folder = self.key[: pattern.start()].rpartition("/")[0] if pattern else self.key
        info = filesystem.get_file_info("/".join(filter(None, (base, folder))))
        if info.type == FileType.NotFound:
            raise UsageError("no such file or folder", where=self.whole_name)
        if info.type == FileType.File:
            return [self._file(filesystem, info, base)]
        below = filesystem.get_file_info(FileSelector(info.path, recursive=True))
        files = [self._file(filesystem, i, base) for i in below if i.type == FileType.File]
        files.sort(key=lambda file: file.name)
        return self._matching(files) if pattern else [self._tree(self.whole_name.rstrip("/"), files)]

    def _file(self, filesystem: FileSystem, info: FileInfo, base: str) -> TraceFile:
        name = f"{self.name}/{info.path.removeprefix(base).lstrip('/')}"
        return TraceFile(shown(name), info.path, info.size, info.mtime_ns, filesystem)

    def _tree(self, folder: str, files: list[TraceFile]) -> Tree:
        leaves = [Leaf(tuple(f.name.removeprefix(folder).strip("/").split("/")), f) for f in files]
        seen = tuple(leaf for leaf in leaves if not any(part.startswith(".") for part in leaf.parts))
        return Tree(folder, tuple(folder.partition("://")[2].split("/")), seen)

    def _matching(self, files: list[TraceFile]) -> list[TraceFile | Tree]:
        """Return files that match the pattern, and folders that do with all their files."""
        pattern = re.compile(re.escape(f"{self.name}/") + _regex_of(self.key))
        found: dict[str, list[TraceFile]] = {}
        for file in files:
            ends = [m.start() for m in re.finditer("/", file.name)][3:]
            ways = [file.name[:end] for end in ends] + [file.name]
            matched = next((way for way in ways if pattern.fullmatch(way)), None)
            if matched:
                found.setdefault(matched, []).append(file)
        if not found:
            raise UsageError("matches no file or folder", where=self.whole_name)
        return [
            inside[0] if inside[0].name == name else self._tree(name, inside)
            for name, inside in found.items()
        ]


def _regex_of(pattern: str) -> str:
    parts, position = [], 0
    for special in _GLOB_PART.finditer(pattern):
        parts.append(re.escape(pattern[position : special.start()]))
        parts.append(_GLOB_MEANS.get(special[0]) or special[0].replace("[!", "[^", 1).replace("\\", r"\\"))
        position = special.end()
    return "".join([*parts, re.escape(pattern[position:])])
