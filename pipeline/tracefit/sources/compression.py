"""Compressed streams to plain chunks: gzip of many members, zstd of many frames, and their cut tails."""

from __future__ import annotations

import io
import tempfile
import zlib
from typing import TYPE_CHECKING, BinaryIO, cast

import pyarrow as pa

from tracefit.errors import TracefitError
from tracefit.sources.limits import CHUNK_BYTES, FREE_EXPANSION_BYTES, MAX_EXPANSION, MAX_RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_WBITS = 31  # zlib's way to say: a gzip header and trailer, nothing else
_PIECE_BYTES = 256 << 10


class DamagedStreamError(TracefitError):
    """The compressed stream stops making sense; every byte before that has been handed out."""


def decompressed(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file in chunks, decompressed if it begins like gzip or zstd.

    Args:
        raw: The file, at its beginning; it need not be seekable.

    Yields:
        Chunks of at most a few MiB.

    Raises:
        DamagedStreamError: After the last byte that could be decompressed, if the compressed data is cut,
            corrupt, or expands beyond what `limits` allows.
    """
    head = _read_fully(raw, len(ZSTD_MAGIC))
    if head.startswith(GZIP_MAGIC):
        yield from _gunzip(_pieces(head, raw, _PIECE_BYTES))
    elif head == ZSTD_MAGIC:
        if raw.seekable():
            yield from _unzstd(raw)
        else:
            with _spooled(_pieces(head, raw, _PIECE_BYTES)) as file:
                yield from _unzstd(file)
    else:
        yield from _pieces(head, raw, CHUNK_BYTES)


def unzstd_record(compressed: bytes) -> bytes:
    """Decompress one zstd frame that holds one record.

    Args:
        compressed: The whole frame.

    Returns:
        The record.

    Raises:
        DamagedStreamError: If the frame is cut or corrupt, or the record larger than `MAX_RECORD_BYTES`.
    """
    record = bytearray()
    for chunk in _unzstd(io.BytesIO(compressed)):
        record += chunk
        if len(record) > MAX_RECORD_BYTES:
            raise DamagedStreamError("record too large")
    return bytes(record)


def _read_fully(raw: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or all there are: a pipe may give fewer than asked at a time."""
    data = b""
    while len(data) < size and (piece := raw.read(size - len(data))):
        data += piece
    return data


def _pieces(head: bytes, raw: BinaryIO, size: int) -> Iterator[bytes]:
    if head:
        yield head
    while piece := raw.read(size):
        yield piece


def _spooled(pieces: Iterable[bytes]) -> BinaryIO:
    """Keep a stream that cannot be rewound on disk: a damaged one has to be read twice."""
    file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
    for piece in pieces:
        file.write(piece)
    return file


def _check_expansion(consumed: int, produced: int) -> None:
    if produced > FREE_EXPANSION_BYTES and produced > MAX_EXPANSION * consumed:
        raise DamagedStreamError(
            f"decompression bomb: more than {MAX_EXPANSION} bytes for each compressed byte"
        )


def _gunzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    consumed = produced = 0
    inflate, started = zlib.decompressobj(_GZIP_WBITS), False
    for piece in pieces:
        consumed += len(piece)
        data = piece
        while data := data if started else data.lstrip(b"\0"):  # tape blocks are padded with zeros
            started = True
            saved = inflate.copy()
            try:
                chunk = inflate.decompress(data, CHUNK_BYTES)
            except zlib.error as error:
                yield from _until_error(saved, data)
                raise DamagedStreamError("gzip data is corrupt") from error
            yield chunk
            produced += len(chunk)
            _check_expansion(consumed, produced)
            data = inflate.unconsumed_tail
            if inflate.eof:
                data = inflate.unused_data
                inflate, started = zlib.decompressobj(_GZIP_WBITS), False
    if started:
        yield inflate.flush()
        raise DamagedStreamError("gzip data is cut")


def _until_error(inflate: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """Yield what `data` holds before its corrupt byte; zlib drops the output of the call that fails."""
    for index in range(len(data)):
        try:
            yield inflate.decompress(data[index : index + 1])
        except zlib.error:
            return


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    stream, produced = _zstd_stream(raw), 0
    while True:
        try:
            chunk = stream.read(CHUNK_BYTES)
        except OSError as error:
            yield from _after(raw, produced)
            cut = "Truncated" in str(error)
            raise DamagedStreamError(f"zstd data is {'cut' if cut else 'corrupt'}") from error
        if not chunk:
            return
        yield chunk
        produced += len(chunk)
        _check_expansion(raw.tell(), produced)


def _after(raw: BinaryIO, produced: int) -> Iterator[bytes]:
    """Yield what follows the first `produced` bytes, up to the damage.

    Arrow drops what it had of a read that fails, so the end is read again, one byte at a time.
    """
    stream = _zstd_stream(raw)
    while produced:
        produced -= len(stream.read(min(produced, CHUNK_BYTES)))
    rest = bytearray()
    try:
        while byte := stream.read(1):
            rest += byte
    except OSError:
        yield bytes(rest)


def _zstd_stream(raw: BinaryIO) -> pa.CompressedInputStream:
    raw.seek(0)
    return pa.CompressedInputStream(pa.PythonFile(_Unclosable(raw), mode="r"), "zstd")


class _Unclosable(io.RawIOBase):
    """A file that stays open when Arrow is done with it."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._raw.read(size)
