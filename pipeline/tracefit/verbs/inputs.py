"""What of a run's files is to be decoded: what the manifest does not know yet."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit._version import __version__
from tracefit.sources.fingerprint import fingerprints
from tracefit.sources.stretches import Layout, lay_out
from tracefit.tables.manifest import IngestedRun, Manifest, ReadFile, StagedPart
from tracefit.tables.staging import STAGE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tracefit.sources import TraceFile
    from tracefit.tables.rows import RowOptions


@dataclass(frozen=True, slots=True)
class Input:
    """A trace file as it is now.

    Attributes:
        file: The file.
        size_bytes: Its size.
        sha256: Hash of it.
        beginnings: Length to hash of its beginnings, for each length a file had when it was read.
    """

    file: TraceFile
    size_bytes: int
    sha256: str
    beginnings: Mapping[int, str]

    def continues(self, file: ReadFile) -> bool:
        """Whether this is a file that was read, perhaps grown since."""
        return self.beginnings.get(file.size_bytes) == file.sha256


@dataclass(frozen=True, slots=True)
class FilePlan:
    """What to do with one file.

    Attributes:
        input: The file.
        layout: How its records lie, and the stretches to decode.
        kept: Staged parts that hold what comes before these stretches.
        is_known: Whether nothing is to be decoded.
    """

    input: Input
    layout: Layout
    kept: tuple[StagedPart, ...]
    is_known: bool = False

    def read(self, parts: Iterable[StagedPart]) -> ReadFile:
        """Return what the manifest says of the file once it was decoded to these parts."""
        return ReadFile(
            path=self.input.file.name,
            size_bytes=self.input.size_bytes,
            sha256=self.input.sha256,
            shape=self.layout.shape,
            can_grow=self.layout.can_grow,
            tool_version=__version__,
            parts=(*self.kept, *parts),
        )


def look_at(files: Iterable[TraceFile], manifest: Manifest) -> list[Input]:
    """Hash the files of a run, in the order of their names.

    Raises:
        UsageError: A file cannot be read.
    """
    sizes = {file.size_bytes for run in manifest.runs.values() for file in run.files}
    inputs = []
    for trace in sorted(files, key=lambda trace: trace.name):
        hashes = fingerprints(trace, sizes)
        size = max(hashes)
        inputs.append(Input(trace, size, hashes[size], hashes))
    return inputs


def content_hash(inputs: Sequence[Input]) -> str:
    """Hash the hashes of a run's files, so that their names and order do not matter."""
    return hashlib.sha256("".join(sorted(i.sha256 for i in inputs)).encode()).hexdigest()


def place(manifest: Manifest, name: str, inputs: Sequence[Input]) -> str:
    """Return the id of a run: its name, or with a number where another run has that name.

    A run that is there is the same if all its files are still there, as they were or grown, under whatever names.
    """
    run_id, number = name, 1
    while (known := manifest.runs.get(run_id)) and known.tables and not _is_same(known, inputs):
        number += 1
        run_id = f"{name}-{number}"
    return run_id


def _is_same(run: IngestedRun, inputs: Sequence[Input]) -> bool:
    return all(any(i.continues(file) for i in inputs) for file in run.files)


def plan_files(
    inputs: Sequence[Input], known: IngestedRun | None, options: str, root: Path
) -> list[FilePlan]:
    """Say for each file of a run what is to be decoded.

    Args:
        inputs: The files.
        known: What the manifest says of the run.
        options: Hash of the options; with others nothing that was decoded is of use.
        root: The tables folder.

    Raises:
        UsageError: A file cannot be opened.
    """
    usable = (
        [] if known is None or known.options != options else [f for f in known.files if _is_there(f, root)]
    )
    return [_plan_file(i, usable) for i in inputs]


def _is_there(file: ReadFile, root: Path) -> bool:
    if file.tool_version != __version__:
        return False
    return all((root / STAGE_NAME / part.name).is_dir() for part in file.parts)


def _plan_file(found: Input, usable: Sequence[ReadFile]) -> FilePlan:
    files = sorted((f for f in usable if found.continues(f)), key=lambda f: f.size_bytes)
    if files and files[-1].sha256 == found.sha256:
        known = files[-1]
        return FilePlan(found, lay_out(found.file), known.parts, is_known=True)
    layout = lay_out(found.file)
    grown = [f for f in files if f.can_grow and f.shape == layout.shape and f.parts]
    if not grown:
        return FilePlan(found, layout, ())
    # What was appended may finish the record that came last: its stretch is decoded again.
    last = grown[-1].parts[-1].begin
    kept = tuple(part for part in grown[-1].parts if part.begin < last)
    return FilePlan(found, lay_out(found.file, begin=last), kept)


def options_hash(options: RowOptions) -> str:
    """Hash the options that decide what is kept of a span."""
    return hashlib.sha256(repr(options).encode()).hexdigest()
