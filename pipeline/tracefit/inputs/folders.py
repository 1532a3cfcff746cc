"""Folders: their files, found by a local path or pattern, and the rules by which files make up runs.

The folder of a run is the nearest one above a file that has a run configuration. Folders of dates do not count.
"""

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

RUN_CONFIG_NAMES = ("exp-config.yaml", "run.yaml")
MODEL_CONFIG_NAME = "config.json"
CONFIG_NAMES = (*RUN_CONFIG_NAMES, MODEL_CONFIG_NAME)
TRACE_NAME = re.compile(r"traces.*\.(json|jsonl|binpb|pb)(\.(gz|zst))?")
KV_NAME = re.compile(r"kv_events.*\.(jsonl|json|msgpack|bin)(\.(gz|zst))?")

_KEYED_FOLDER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*=.*")
_YEAR, _TWO_DIGITS = re.compile(r"(19|20)\d\d"), re.compile(r"\d\d")
_LOOSE_SUFFIXES = re.compile(r"(\.(json|jsonl|binpb|pb|gz|zst))+$")
_UNCLEAN = re.compile(r"[^A-Za-z0-9._-]+")

FolderParts = tuple[str, ...]
"""The path of a folder: the names of the folders above it and its own."""

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


def run_folder(folder: FolderParts, configured: set[FolderParts]) -> FolderParts:
    """Return the folder of the run whose files lie in `folder`."""
    above = (folder[:depth] for depth in range(len(folder), -1, -1))
    return next((each for each in above if each in configured), without_dates(folder))


def without_dates(folders: FolderParts) -> FolderParts:
    """Drop trailing folders that an exporter names after the time: `year=…/month=…/…`, or numbers alone as in `2026/02`."""
    while folders and _KEYED_FOLDER.fullmatch(folders[-1]):
        folders = folders[:-1]
    digits = len(folders)
    while digits and _TWO_DIGITS.fullmatch(folders[digits - 1]):
        digits -= 1
    is_date = 0 < digits < len(folders) and _YEAR.fullmatch(folders[digits - 1])
    return folders[: digits - 1] if is_date else folders


def clean_run_id(name: str) -> str:
    """Return `name` reduced to letters, digits, dot, underscore and dash; never empty, never a path."""
    return _UNCLEAN.sub("-", name).strip("-.")[:120] or "run"


def common_stem(names: list[str]) -> str:
    """Return the common prefix of file names without a run folder; the stem of the first if there is none."""
    stems = [_LOOSE_SUFFIXES.sub("", name) for name in names]
    common = stems[0]
    for stem in stems[1:]:
        while not stem.startswith(common):
            common = common[:-1]
    return common.rstrip("-._") or stems[0]
