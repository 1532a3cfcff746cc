"""What of a run's files is to be decoded: what the manifest does not know yet."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracefit._version import __version__
from tracefit.sources.stretches import Layout, lay_out
from tracefit.tables.manifest import Manifest, ReadFile, StagedPart
from tracefit.tables.staging import STAGE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tracefit.tables.rows import RowOptions
    from tracefit.verbs.inputs import Input


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

    @property
    def is_known(self) -> bool:
        """Whether nothing is to be decoded."""
        return self.layout is None

    def read(self, parts: Iterable[StagedPart]) -> ReadFile:
        """Return what the manifest says of the file once it was decoded to these parts."""
        return ReadFile(
            path=self.input.file.name,
            size_bytes=self.input.size_bytes,
            sha256=self.input.sha256,
            shape=self.shape,
            can_grow=self.can_grow,
            tool_version=__version__,
            parts=(*self.kept, *parts),
        )


def plan_files(
    inputs: Sequence[Input], before: Sequence[ReadFile], manifest: Manifest, options: str, root: Path
) -> list[FilePlan]:
    """Say for each file of a run what is to be decoded.

    Args:
        inputs: The files.
        before: Files that these may be, perhaps grown.
        manifest: What was decoded, of any run: whatever has the same contents is of use.
        options: Hash of the options; with others nothing that was decoded is of use.
        root: The tables folder.

    Raises:
        UsageError: A file cannot be opened.
    """
    there = {part.name for part in (root / STAGE_NAME).glob("*")}
    decoded = [
        file
        for run in manifest.runs.values()
        if run.options == options
        for file in run.files
        if file.tool_version == __version__ and all(part.name in there for part in file.parts)
    ]
    stock = _Stock.of(decoded)
    contents = {(i.size_bytes, i.sha256) for i in inputs}
    usable = {id(file) for file in decoded}
    beginnings = [
        file
        for file in before
        if id(file) in usable and file.can_grow and (file.size_bytes, file.sha256) not in contents
    ]
    return [_plan_file(found, stock, beginnings) for found in inputs]


@dataclass(slots=True)
class _Stock:
    """What was decoded, by its contents. The rows of a file are given to one file alone: of its copies each has its own."""

    files: dict[tuple[int, str], list[ReadFile]]
    given: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def of(cls, files: Iterable[ReadFile]) -> _Stock:
        by_content: dict[tuple[int, str], list[ReadFile]] = {}
        for file in files:
            by_content.setdefault((file.size_bytes, file.sha256), []).append(file)
        return cls(by_content)

    def find(self, wanted: Input) -> ReadFile | None:
        """Take a file with these contents, that of the same name if there is one."""
        like = self.files.get((wanted.size_bytes, wanted.sha256), ())
        for file in sorted(like, key=lambda file: file.path != wanted.file.name):
            if self.take(file.parts):
                return file
        return None

    def take(self, parts: Iterable[StagedPart]) -> bool:
        """Take parts, unless another file has one of them."""
        places = {(part.name, part.file) for part in parts}
        if places & self.given:
            return False
        self.given |= places
        return True


def _plan_file(found: Input, stock: _Stock, beginnings: Sequence[ReadFile]) -> FilePlan:
    if known := stock.find(found):
        return FilePlan(found, None, known.parts, known.shape, known.can_grow)
    layout = lay_out(found.file)
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
