"""How much of a file is believed: sizes in it are the sender's word, memory is ours."""

from __future__ import annotations

CHUNK_BYTES = 1 << 20
"""Bytes read, or decompressed, at a time."""

MAX_RECORD_BYTES = 256 << 20
"""A record longer than this is rejected without being held in memory."""

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
