"""How much of a file is believed: sizes in it are the sender's word, memory is ours."""

from __future__ import annotations

CHUNK_BYTES = 1 << 20
"""Bytes read, or decompressed, at a time."""

MAX_RECORD_BYTES = 64 << 20
"""A record that is held whatever its length (compressed by itself, or msgpack) is rejected if it is longer."""

MAX_EXPANSION = 1000
"""Decompressed bytes allowed per compressed byte; traces reach 30, files of one repeated record a few hundred."""

FREE_EXPANSION_BYTES = 64 << 20
"""Decompressed bytes allowed whatever the ratio, so that small files of zeros are just odd, not hostile."""

HEAD_BYTES = 1 << 20
"""Bytes looked at to tell the shape of a file."""

MAX_GUESSES = 10_000
"""Likely beginnings of a message that are looked at closely, per file, where damage hides the true one."""

MAX_REREAD_BYTES, MAX_REREAD_SHARE = 32 << 20, 2
"""Bytes of a compressed file that are read again to find what follows damage: so many, and so often the file's size."""

MAX_HELD_BYTES = 8 << 20
"""A record longer than this is taken apart into smaller ones, whatever its length."""

PIECE_BYTES = 4 << 20
"""About how long these are."""

MAX_SPAN_BYTES = 32 << 20
"""A span of such a record that is longer is rejected, and the rest of the record with it."""

MAX_ORIGIN_BYTES = 1 << 20
"""A resource or scope of such a record that is longer is left out: each of the smaller ones has a copy."""

MAX_SHORT_LINES = 10_000
"""Lines too short to hold anything, and bad, that are looked at one by one; a file can have them by the million."""
