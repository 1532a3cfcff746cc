"""The trace files of a run as they are now, and which run of the tables they are: told from their contents."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit.sources.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.sources import TraceFile
    from tracefit.tables.manifest import IngestedRun, Manifest, ReadFile


@dataclass(frozen=True, slots=True)
class Input:
    """A trace file as it is now.

    Attributes:
        file: The file.
        size_bytes: Its size.
        sha256: Hash of it.
        beginnings: Length to hash of its beginnings, as far as somebody asked for them.
        modified_ns: When it was last changed, of a file in a bucket.
    """

    file: TraceFile
    size_bytes: int
    sha256: str
    beginnings: dict[int, str]
    modified_ns: int | None = None

    @classmethod
    def of(cls, file: TraceFile, sizes: Iterable[int] = ()) -> Input:
        """Hash a file, and its beginnings of these lengths.

        Raises:
            UsageError: The file cannot be read.
        """
        return cls.hashed(file, fingerprints(file, sizes))

    @classmethod
    def hashed(cls, file: TraceFile, hashes: dict[int, str], *, modified_ns: int | None = None) -> Input:
        """Return a file whose hashes are known."""
        size = max(hashes)
        return cls(file, size, hashes[size], hashes, modified_ns)

    def continues(self, known: ReadFile) -> bool:
        """Whether this is a file that was read, perhaps grown since."""
        size = known.size_bytes
        # Nothing is fetched for this: of what lay in a bucket, all that may be asked for is hashed on the way.
        if size < self.size_bytes and size not in self.beginnings and self.modified_ns is None:
            self.beginnings.update(fingerprints(self.file, [size]))
        return self.beginnings.get(size) == known.sha256


def look_at(files: Iterable[TraceFile], known: Iterable[ReadFile]) -> list[Input]:
    """Hash the files of a run, in the order of their names.

    Args:
        files: The files.
        known: Files that these may be, perhaps grown.

    Raises:
        UsageError: A file cannot be read.
    """
    contents = {(file.size_bytes, file.sha256) for file in known}
    sizes = {size for size, _ in contents}
    ordered = sorted(files, key=lambda file: file.name)
    likely = {file.path: Input.of(file) for file in ordered if file.size in sizes}
    same = {path: found for path, found in likely.items() if (found.size_bytes, found.sha256) in contents}
    # Only what is not there any more can have become the beginning of another file.
    gone = contents - {(found.size_bytes, found.sha256) for found in same.values()}
    left = {size for size, _ in gone}
    return [same.get(file.path) or Input.of(file, left) for file in ordered]


def content_hash(inputs: Sequence[Input]) -> str:
    """Hash the hashes of a run's files, so that their names and order do not matter."""
    return hashlib.sha256("".join(sorted(i.sha256 for i in inputs)).encode()).hexdigest()


def namesakes(manifest: Manifest, name: str) -> list[ReadFile]:
    """Return the files of all runs that have this name, or the name and a number."""
    return [file for run_id in _ids(name, manifest) for file in manifest.runs[run_id].files]


def place(manifest: Manifest, name: str, inputs: Sequence[Input]) -> str:
    """Return the id of a run: its name, or with a number where another run has that name.

    A run that is there is the same if all its files are still there, as they were or grown, under whatever names.
    """
    ids = _ids(name, manifest)
    for run_id in ids:
        if not manifest.runs[run_id].tables or _is_same(manifest.runs[run_id], inputs):
            return run_id
    return _numbered(name, len(ids) + 1)


def _ids(name: str, manifest: Manifest) -> list[str]:
    def taken() -> Iterator[str]:
        number = 1
        while (run_id := _numbered(name, number)) in manifest.runs:
            yield run_id
            number += 1

    return list(taken())


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _is_same(run: IngestedRun, inputs: Sequence[Input]) -> bool:
    contents = {(i.size_bytes, i.sha256) for i in inputs}
    changed = (file for file in run.files if (file.size_bytes, file.sha256) not in contents)
    return all(any(i.continues(file) for i in inputs) for file in changed)
