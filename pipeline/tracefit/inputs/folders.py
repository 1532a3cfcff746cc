"""Expand a local path or glob pattern into files, and folders with all files below them."""

from __future__ import annotations

import glob
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.inputs.files import TraceFile, cannot_open, display_name, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.inputs.run_folders import FolderParts

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, local or remote, and all files below it.

    Attributes:
        name: The name shown to the user.
        parts: The names of the folders above it and its own; runs are named after them.
        files: Each file with its path below this folder, in parts; sorted, without hidden ones.
        irregular: Names that are no regular files, such as pipes and broken links.
    """

    name: str
    parts: FolderParts
    files: tuple[tuple[FolderParts, TraceFile], ...]
    irregular: tuple[str, ...] = ()


def find_local(path: str) -> list[TraceFile | Folder]:
    """Return the files and folders that match a path or pattern, sorted by name.

    Raises:
        UsageError: If nothing matches, or the match may not be read.
    """
    if not path or "\0" in path:
        raise UsageError("is not a path", where=repr(path))
    if _GLOB.search(path) and not os.path.lexists(path):
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - keeps the user's spelling
        if not matches:
            raise UsageError("matches no file or folder", where=display_name(path))
        return [_find_one(match) for match in matches]
    return [_find_one(path)]


def _find_one(path: str) -> TraceFile | Folder:
    try:
        is_folder = stat.S_ISDIR(Path(path).stat().st_mode)
    except FileNotFoundError as error:
        raise UsageError("no such file or folder", where=display_name(path)) from error
    except OSError as error:
        raise cannot_open(display_name(path), error) from error
    return _folder(path) if is_folder else TraceFile.local(path)


def _folder(root: str) -> Folder:
    files, irregular = [], []
    for parts, path in _walk(root):
        if Path(path).is_file():
            files.append((parts, TraceFile.local(path)))
        else:
            irregular.append(display_name(path))
    above = tuple(display_name(part) for part in Path(root).resolve().parts[1:])
    return Folder(display_name(root), above, tuple(files), tuple(irregular))


def _walk(root: str) -> Iterator[tuple[FolderParts, str]]:
    """Yield all non-folders below a folder. Links are followed, and each folder is entered once, so that loops end."""
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
            yield tuple(display_name(part) for part in (*inside, name)), str(Path(folder, name))


def _refuse_folder(error: OSError) -> None:
    raise UsageError(
        f"cannot be listed ({reason_of(error)})",
        where=display_name(str(error.filename)),
        hint="check its permissions, or name the files to read",
    ) from error
