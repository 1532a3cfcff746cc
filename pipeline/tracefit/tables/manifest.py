"""`TABLES/manifest.json`: what was read, and which files of the folder are valid.

The manifest is replaced last, in one rename: a reader that follows it sees each run as it was before or as it is after
an ingest, never in between. A file that it does not name is a leftover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tracefit._version import __version__
from tracefit.errors import DataError
from tracefit.tables.disk import inside, open_regular, write_whole

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST_NAME = "manifest.json"


RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")]
"""What names a folder of a table: never a path."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StagedPart(_Strict):
    """Decoded rows of a trace file."""

    name: str = Field(pattern=r"^[0-9a-f]{32}$", description="folder below .stage")
    file: int = Field(ge=0, description="number that the file's rows have in the part: small files share one")
    spans: int = Field(ge=0, description="spans of the vLLM scopes in it")
    other_spans: int = Field(ge=0, description="spans of other scopes, counted and left out")
    rejects: int = Field(ge=0, description="records in it that could not be read")


class ReadFile(_Strict):
    """A trace file that was read; of the same name, size and hash it is not decoded again."""

    path: str = Field(description="the file as it was named")
    size_bytes: int = Field(ge=0, description="its size as stored")
    sha256: str = Field(description="SHA-256 of its bytes as stored")
    modified_ns: int | None = Field(
        None,
        description="Unix time of its last change, of a file in a bucket: with that and the size it is known",
    )
    tool_version: str = Field(description="version of tracefit that decoded it")
    parts: tuple[StagedPart, ...]


class TablePart(_Strict):
    """A Parquet file of one run and table."""

    name: str = Field(pattern=r"^part-[0-9a-f]{16}\.parquet$")


class IngestedRun(_Strict):
    """What is known of one run."""

    source: str | None = Field(
        None, description="the folder it was read from; null for files named one by one"
    )
    options: str | None = Field(None, description="hash of the options that say what of a span is kept")
    files: tuple[ReadFile, ...] = ()
    built_from: str | None = Field(
        None,
        description="hash of what its tables were built from, files and configuration; null before there are any",
    )
    tables: dict[str, TablePart] = Field(default_factory=dict)


class Manifest(_Strict):
    """The manifest of a tables folder."""

    manifest_version: Literal["1"] = "1"
    tool_version: str = __version__
    runs: dict[RunId, IngestedRun] = Field(default_factory=dict)

    def with_run(self, run_id: str, run: IngestedRun) -> Manifest:
        """Return a manifest in which this run is as given."""
        return Manifest(runs={**self.runs, run_id: run})

    def staged(self) -> set[str]:
        """Return the names of all staged parts that are valid."""
        return {part.name for run in self.runs.values() for file in run.files for part in file.parts}


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of a tables folder; an empty one if there is none.

    Raises:
        DataError: The manifest is damaged or of another version.
        UsageError: It is a symbolic link.
    """
    path = inside(root, MANIFEST_NAME)
    try:
        with open_regular(path) as stream:
            text = stream.read()
    except FileNotFoundError:
        return Manifest()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=str(path)) from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            "is not a manifest of this version of tracefit",
            where=str(path),
            hint="ingest the traces into a new folder",
        ) from error


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the manifest of a tables folder in one step."""
    text = manifest.model_dump_json(indent=1) + "\n"
    write_whole(root / MANIFEST_NAME, text.encode())
