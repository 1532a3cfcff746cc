"""What of a run's files is to be decoded: what the manifest does not know yet."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracefit._version import __version__
from tracefit.sources.frames import refuse_other_signal
from tracefit.sources.stretches import Layout, lay_out
from tracefit.tables.manifest import Manifest, ReadFile, StagedPart
from tracefit.tables.staging import STAGE_NAME
from tracefit.verbs.inputs import Input

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tracefit.sources import TraceFile
    from tracefit.tables.rows import RowOptions


@dataclass(frozen=True, slots=True)
class FilePlan:
    """What to do with one file.

    Attributes:
        input: The file.
        layout: How its records lie, and the stretches to decode; None if nothing is to be decoded.
        kept: Staged parts that hold what comes before these stretches, or everything.
        shape: How its records lie.
        can_grow: Whether what is appended can be read without what is there.
    """

    input: Input
    layout: Layout | None
    kept: tuple[StagedPart, ...]
    shape: str
    can_grow: bool

    @classmethod
    def decode(cls, found: Input, layout: Layout, kept: tuple[StagedPart, ...] = ()) -> FilePlan:
        """Return the plan for a file of which something is to be decoded."""
        return cls(found, layout, kept, layout.shape, layout.can_grow)

    @classmethod
    def known(cls, found: Input, known: ReadFile) -> FilePlan:
        """Return the plan for a file that was decoded already."""
        return cls(found, None, known.parts, known.shape, known.can_grow)

    @property
    def is_known(self) -> bool:
        """Whether nothing is to be decoded."""
        return self.layout is None

    @property
    def bytes_to_read(self) -> int:
        """Bytes of the file that are to be decoded."""
        return self.input.size_bytes - self.layout.stretches[0].begin if self.layout else 0

    def read(self, parts: Iterable[StagedPart]) -> ReadFile:
        """Return what the manifest says of the file once it was decoded to these parts."""
        return ReadFile(
            path=self.input.file.name,
            size_bytes=self.input.size_bytes,
            sha256=self.input.sha256,
            modified_ns=self.input.modified_ns,
            shape=self.shape,
            can_grow=self.can_grow,
            tool_version=__version__,
            parts=(*self.kept, *parts),
        )


@dataclass(slots=True)
class Stock:
    """What was decoded, of any run: whatever has the same contents is of use.

    The rows of a file are given to one file alone: of its copies each has its own.
    """

    _by_content: dict[tuple[int, str], list[ReadFile]]
    _by_place: dict[tuple[str, int, int | None], ReadFile]
    _given: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def of(cls, manifest: Manifest, options: str, root: Path) -> Stock:
        """Return what is of use with the options that have this hash, in the tables folder."""
        there = {part.name for part in (root / STAGE_NAME).glob("*")}
        by_content: dict[tuple[int, str], list[ReadFile]] = {}
        by_place = {}
        for file in (f for run in manifest.runs.values() if run.options == options for f in run.files):
            if file.tool_version == __version__ and all(part.name in there for part in file.parts):
                by_content.setdefault((file.size_bytes, file.sha256), []).append(file)
                by_place[file.path, file.size_bytes, file.modified_ns] = file
        return cls(by_content, by_place)

    def as_it_was(self, file: TraceFile) -> FilePlan | None:
        """Take what was decoded of a file in a bucket that has not changed since, by its size and its time."""
        known = self._by_place.get((file.name, file.size, file.modified_ns))
        if file.filesystem is None or file.modified_ns is None or known is None or not self.take(known.parts):
            return None
        hashes = {known.size_bytes: known.sha256}
        return FilePlan.known(Input.hashed(file, hashes, modified_ns=file.modified_ns), known)

    def find(self, wanted: Input) -> ReadFile | None:
        """Take a file with these contents, that of the same name if there is one."""
        like = self._by_content.get((wanted.size_bytes, wanted.sha256), ())
        for file in sorted(like, key=lambda file: file.path != wanted.file.name):
            if self.take(file.parts):
                return file
        return None

    def has(self, file: ReadFile) -> bool:
        """Whether this file's own rows are of use."""
        return any(file is like for like in self._by_content.get((file.size_bytes, file.sha256), ()))

    def take(self, parts: Iterable[StagedPart]) -> bool:
        """Take parts, unless another file has one of them."""
        places = {(part.name, part.file) for part in parts}
        if places & self._given:
            return False
        self._given |= places
        return True


def plan_files(inputs: Sequence[Input], before: Sequence[ReadFile], stock: Stock) -> list[FilePlan]:
    """Say for each file of a run what is to be decoded.

    Args:
        inputs: The files.
        before: Files that these may be, perhaps grown.
        stock: What was decoded.

    Raises:
        UsageError: A file cannot be opened.
        DataError: A file holds OTLP logs or metrics.
    """
    contents = {(i.size_bytes, i.sha256) for i in inputs}
    beginnings = [
        file
        for file in before
        if file.can_grow and (file.size_bytes, file.sha256) not in contents and stock.has(file)
    ]
    return [_plan_file(found, stock, beginnings) for found in inputs]


def _plan_file(found: Input, stock: Stock, beginnings: Sequence[ReadFile]) -> FilePlan:
    if known := stock.find(found):
        return FilePlan.known(found, known)
    layout = lay_out(found.file)
    refuse_other_signal(found.file.name, layout.contents.signal)
    grown = [f for f in beginnings if f.shape == layout.shape and f.parts and found.continues(f)]
    if not grown:
        return FilePlan.decode(found, layout)
    # What was appended may finish the record that came last: its stretch is decoded again.
    longest = max(grown, key=lambda f: f.size_bytes)
    last = longest.parts[-1].begin
    kept = tuple(part for part in longest.parts if part.begin < last)
    if not kept or not stock.take(kept):
        return FilePlan.decode(found, layout)
    return FilePlan.decode(found, lay_out(found.file, begin=last), kept)


def options_hash(options: RowOptions) -> str:
    """Hash the options that decide what is kept of a span."""
    return hashlib.sha256(repr(options).encode()).hexdigest()
