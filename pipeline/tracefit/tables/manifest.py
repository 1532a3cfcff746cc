"""`TABLES/manifest.json`: which trace files were read, and which files of the folder are valid.

The manifest is replaced last, in one rename or one conditional write: a reader that follows it sees each run either as before or as after an
ingest, never in between. A file that it does not name is a leftover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from tracefit._version import __version__
from tracefit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.inputs.buckets import Version
    from tracefit.tables.places import Place

MANIFEST_NAME = "manifest.json"


RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$")]
"""The name of a run's folder in a table; never a path."""


Count = Annotated[int, Meta(ge=0)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the manifest's structs. Not pydantic: loading it takes as long as ingesting a small run."""


class StagedPart(_Strict, frozen=True):
    """Decoded rows of a trace file."""

    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$", description="folder below .stage")]
    file: Annotated[
        Count, Meta(description="number that the file's rows have in the part: small files share one")
    ]
    spans: Annotated[Count, Meta(description="spans of the vLLM scopes in it")]
    other_spans: Annotated[Count, Meta(description="spans of other scopes, counted and left out")]
    rejects: Annotated[Count, Meta(description="records in it that could not be read")]


class ReadFile(_Strict, frozen=True):
    """A trace file that was read; while name, size and hash are the same, it is not decoded again."""

    path: Annotated[str, Meta(description="the file as it was named")]
    size_bytes: Annotated[Count, Meta(description="its size as stored")]
    sha256: Annotated[str, Meta(description="SHA-256 of its bytes as stored")]
    tool_version: Annotated[str, Meta(description="version of tracefit that decoded it")]
    parts: tuple[StagedPart, ...]
    modified_ns: Annotated[
        int | None,
        Meta(
            description="Unix time of its last change, of a file in a bucket: with that and the size it is known"
        ),
    ] = None


class TableFile(_Strict, frozen=True):
    """A Parquet file of one run and table."""

    name: Annotated[str, Meta(pattern=r"^part-[0-9a-f]{16}\.parquet$")]


class IngestedRun(_Strict, frozen=True):
    """One ingested run: its files and its tables."""

    source: Annotated[
        str | None, Meta(description="the folder it was read from; null for files named one by one")
    ] = None
    options: Annotated[
        str | None, Meta(description="hash of the options that say what of a span is kept")
    ] = None
    files: tuple[ReadFile, ...] = ()
    built_from: Annotated[
        str | None,
        Meta(
            description="hash of what its tables were built from, files and configuration; "
            "null before there are any"
        ),
    ] = None
    tables: dict[str, TableFile] = {}


class Manifest(_Strict, frozen=True):
    """The manifest of a tables folder."""

    manifest_version: Literal["1"] = "1"
    tool_version: str = __version__
    runs: dict[RunId, IngestedRun] = {}

    def with_runs(self, runs: Mapping[str, IngestedRun]) -> Manifest:
        """Return a manifest with these runs added or replaced."""
        return Manifest(runs={**self.runs, **runs})

    def staged(self) -> set[str]:
        """Return the names of all staged parts that are valid."""
        return {part.name for run in self.runs.values() for file in run.files for part in file.parts}


def read_manifest(place: Place) -> tuple[Manifest, Version | None]:
    """Read the manifest of a place, an empty one if there is none; and its version, for `replace_manifest`.

    Raises:
        DataError: The manifest is damaged or of another version.
        UsageError: It is a symbolic link, or the bucket cannot be read.
    """
    try:
        text, version = place.read_versioned(MANIFEST_NAME)
    except FileNotFoundError:
        return Manifest(), None
    try:
        return msgspec.json.decode(text, type=Manifest), version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            "is not a manifest of this version of tracefit",
            where=str(place.root / MANIFEST_NAME),
            hint="ingest the traces into a new folder",
        ) from error


def replace_manifest(place: Place, manifest: Manifest, version: Version | None) -> bool:
    """Replace the manifest of a place in one step, if it is still the one that was read; say whether it was."""
    # Indented: people read it to see which files a table was made of.
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return place.replace_if(MANIFEST_NAME, text + b"\n", version)
