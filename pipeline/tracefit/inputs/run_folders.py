"""The naming rules of run folders: which files belong to which run, and what the run is called.

The folder of a run is the nearest one above a file that has a run configuration. Folders of dates do not count.
"""

from __future__ import annotations

import re

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
