"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write texts as UTF-8 files, each there whole or not at all.

    Raises:
        UsageError: A file cannot be written.
    """
    write_bytes({path: text.encode("utf-8") for path, text in texts.items()})


def write_bytes(contents: Mapping[Path, bytes]) -> None:
    """Write files so that each is there whole or not at all.

    Raises:
        UsageError: A file cannot be written.
    """
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            Path(unfinished).chmod(0o644)
            Path(unfinished).replace(path)
        except OSError as error:
            raise UsageError(f"cannot be written ({error.strerror or error})", where=str(path)) from error
