"""Run folders: what the user points at becomes runs with their trace files and configuration files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACE_NAME = re.compile(r"^traces.*\.(json|jsonl|binpb|pb)(\.(gz|zst))?$")
RUN_CONFIG_NAMES = ("exp-config.yaml", "run.yaml")
MODEL_CONFIG_NAME = "config.json"
_LOOSE_SUFFIXES = re.compile(r"(\.(json|jsonl|binpb|pb|gz|zst))+$")
_UNCLEAN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class RunSource:
    """One run as it lies on disk."""

    run_id: str
    trace_files: tuple[Path, ...]
    run_config: Path | None = None
    model_config: Path | None = None


def clean_run_id(name: str) -> str:
    """Return `name` reduced to letters, digits, dot, underscore and dash; never empty, never a path."""
    return _UNCLEAN.sub("-", name).strip("-.")[:120] or "run"


def find_runs(paths: Iterable[str | Path]) -> list[RunSource]:
    """Find the runs under the given paths.

    A folder with trace files is a run; a folder without is searched for run folders below it. Files named one by one
    make up one run together.

    Raises:
        UsageError: A path does not exist, or a folder holds no trace files.
    """
    runs: list[RunSource] = []
    loose: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            runs += _runs_in(path)
        elif path.exists():
            loose.append(path)
        else:
            raise UsageError("no such file or folder", where=str(path))
    if loose:
        runs.append(RunSource(clean_run_id(_common_stem(loose)), tuple(loose)))
    if not runs:
        raise UsageError("no trace files were named", hint="name a run folder, or trace files")
    return list({run.trace_files: run for run in runs}.values())


def _runs_in(folder: Path) -> list[RunSource]:
    own = _trace_files(folder)
    if own:
        return [_run_of(folder, own)]
    below = sorted({p.parent for p in folder.rglob("traces*") if TRACE_NAME.match(p.name) and p.is_file()})
    if not below:
        raise UsageError(
            "holds no trace files",
            where=str(folder),
            hint="a run folder has traces*.json, .jsonl, .binpb or .pb, plain or with .gz or .zst",
        )
    return [_run_of(run, _trace_files(run)) for run in below]


def _trace_files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(p for p in folder.iterdir() if p.is_file() and TRACE_NAME.match(p.name)))


def _run_of(folder: Path, traces: tuple[Path, ...]) -> RunSource:
    configs = [folder / name for name in RUN_CONFIG_NAMES if (folder / name).is_file()]
    model = folder / MODEL_CONFIG_NAME
    return RunSource(
        run_id=clean_run_id(folder.resolve().name),
        trace_files=traces,
        run_config=configs[0] if configs else None,
        model_config=model if model.is_file() else None,
    )


def _common_stem(files: list[Path]) -> str:
    stems = [_LOOSE_SUFFIXES.sub("", f.name) for f in files]
    common = stems[0]
    for stem in stems[1:]:
        while not stem.startswith(common):
            common = common[:-1]
    return common.rstrip("-._") or stems[0]
