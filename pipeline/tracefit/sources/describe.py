"""What a trace file looks like from outside, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit.sources.sniff import sniff

if TYPE_CHECKING:
    from tracefit.sources.files import TraceFile


@dataclass(frozen=True, slots=True)
class FileShape:
    """One trace file: its name, size as stored, compression and shape in words."""

    name: str
    bytes: int
    compression: str
    shape: str


def describe_file(file: TraceFile) -> FileShape:
    """Tell what a trace file is from its head.

    Raises:
        UsageError: The file cannot be read.
    """
    contents = sniff(file)
    name = file.name.rpartition("/")[2]
    return FileShape(name, file.size, contents.compression or "none", str(contents))
