"""Which folder a run is: the nearest with a run configuration, not counting folders of dates."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyarrow.fs import FileType

from tracefit.sources.files import TraceFile, cannot_open, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

RUN_CONFIG_NAMES = ("exp-config.yaml", "run.yaml")
MODEL_CONFIG_NAME = "config.json"
CONFIG_NAMES = (*RUN_CONFIG_NAMES, MODEL_CONFIG_NAME)

_KEYED_FOLDER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*=.*")
_YEAR, _TWO_DIGITS = re.compile(r"(19|20)\d\d"), re.compile(r"\d\d")

Folder = tuple[str, ...]
"""The names of the folders on the way to it and its own."""


@dataclass(frozen=True, slots=True)
class NamedTogether:
    """Files that were named one by one and belong together.

    Attributes:
        files: The files, in the order they were named in.
        folder: The name of their folder, where that configures a run; else None.
        configs: Its configuration files by their names.
    """

    files: list[TraceFile]
    folder: str | None
    configs: dict[str, TraceFile]


def run_folder(folder: Folder, configured: set[Folder]) -> Folder:
    """Return the folder of the run whose files lie in `folder`."""
    above = (folder[:depth] for depth in range(len(folder), -1, -1))
    return next((each for each in above if each in configured), without_dates(folder))


def without_dates(folders: Folder) -> Folder:
    """Leave off the folders that an exporter makes of the time: `year=…/month=…/…`, or year, month and so on alone."""
    while folders and _KEYED_FOLDER.fullmatch(folders[-1]):
        folders = folders[:-1]
    digits = len(folders)
    while digits and _TWO_DIGITS.fullmatch(folders[digits - 1]):
        digits -= 1
    is_date = 0 < digits < len(folders) and _YEAR.fullmatch(folders[digits - 1])
    return folders[: digits - 1] if is_date else folders


def named_together(files: Iterable[TraceFile]) -> list[NamedTogether]:
    """Put files that were named one by one together: those beside one run configuration, and all that are beside none.

    Raises:
        UsageError: A bucket cannot be looked into.
    """
    folders: dict[str, NamedTogether] = {}
    alone = NamedTogether([], None, {})
    for file in files:
        parts = _folder_of(file)
        key = "/".join(parts)
        if key not in folders:
            configs = _configs_in(key, file)
            is_run = any(name in configs for name in RUN_CONFIG_NAMES)
            folders[key] = NamedTogether([], parts[-1], configs) if is_run else alone
        folders[key].files.append(file)
    return list({id(group): group for group in folders.values()}.values())


def _folder_of(file: TraceFile) -> Folder:
    path = file.path if file.filesystem else os.path.abspath(file.path)  # noqa: PTH100 - `..` of a link stays what it is
    return without_dates(tuple(path.split("/")[:-1])) or ("",)


def _configs_in(folder: str, beside: TraceFile) -> dict[str, TraceFile]:
    paths = {name: f"{folder}/{name}" for name in CONFIG_NAMES}
    if beside.filesystem is None:
        return {name: TraceFile.local(path) for name, path in paths.items() if Path(path).is_file()}
    try:
        found = beside.filesystem.get_file_info(list(paths.values()))
    except OSError as error:
        raise cannot_open(beside.name, error) from error
    return {
        name: TraceFile(shown(info.path), info.path, info.size, filesystem=beside.filesystem)
        for name, info in zip(paths, found, strict=True)
        if info.type == FileType.File
    }
