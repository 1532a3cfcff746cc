"""What a trace file looks like from outside: compression and shape, without reading it through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.sources.compression import GZIP_MAGIC, ZSTD_MAGIC, decompressed
from tracefit.sources.shape import Shape, tell_shape
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from pathlib import Path

SHAPE_NAMES: dict[Shape, str] = {
    "empty": "empty",
    "lines": "OTLP JSON lines",
    "document": "one OTLP JSON document",
    "bare": "one OTLP protobuf message",
    "framed": "length-prefixed OTLP protobuf",
    "framed zstd": "length-prefixed OTLP protobuf, each record zstd",
    "unknown": "not OTLP traces",
}


@dataclass(frozen=True, slots=True)
class FileShape:
    """One trace file: its name, size on disk, compression and shape in words."""

    name: str
    bytes: int
    compression: str
    shape: str


def describe_file(path: Path) -> FileShape:
    """Tell what a trace file is from its head.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        with path.open("rb") as raw:
            magic = raw.read(len(ZSTD_MAGIC))
            raw.seek(0)
            shape = tell_shape(Window(decompressed(raw)))
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", where=str(path)) from error
    return FileShape(path.name, size, _compression(magic), SHAPE_NAMES[shape])


def _compression(magic: bytes) -> str:
    if magic.startswith(GZIP_MAGIC):
        return "gzip"
    return "zstd" if magic == ZSTD_MAGIC else "none"
