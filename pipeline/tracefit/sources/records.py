"""What this room hands on: one frame per record of a file, or why a stretch of the file is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Encoding = Literal["json", "protobuf"]


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes of one record: one export request, or one document of a file that was saved by hand.

    Attributes:
        source_file: The file as the caller named it; `-` is standard input.
        offset: Where the payload begins, in bytes of the decompressed file.
        payload: The record without its framing.
        encoding: How the payload is to be read.
    """

    source_file: str
    offset: int
    payload: bytes
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that could not be read.

    `length` is in bytes of the decompressed file; `excerpt` shows structure and keys, never values.
    """

    source_file: str
    source_offset: int
    length: int
    reason: str
    excerpt: str = ""
