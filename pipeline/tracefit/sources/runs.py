"""What the user points at becomes runs, with their trace files and configuration files."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tracefit.errors import UsageError
from tracefit.sources.files import TraceFile, reason_of, shown
from tracefit.sources.frames import STDIN, refuse_other_signal
from tracefit.sources.kv_frames import KV_NAME
from tracefit.sources.run_folders import (
    CONFIG_NAMES,
    MODEL_CONFIG_NAME,
    RUN_CONFIG_NAMES,
    named_together,
    run_folder,
    without_dates,
)
from tracefit.sources.sniff import sniff
from tracefit.sources.trees import FileSystemOf, Leaf, Tree, files_and_trees, open_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TRACE_NAME = re.compile(r"traces.*\.(json|jsonl|binpb|pb)(\.(gz|zst))?")
STDIN_RUN_ID = "stdin"

_MAX_CONFIG_BYTES = 16 << 20
_COPY_BYTES = 1 << 20
_LOOSE_SUFFIXES = re.compile(r"(\.(json|jsonl|binpb|pb|gz|zst))+$")
_UNCLEAN = re.compile(r"[^A-Za-z0-9._-]+")
_PIPE_OF_PROCESS = re.compile(r"/dev/(fd/\d+|stdin)|/proc/(self|\d+)/fd/\d+")


@dataclass(frozen=True, slots=True)
class RunSource:
    """One run as it lies on disk or in a bucket.

    Attributes:
        run_id: Its cleaned name; two runs may have the same.
        name: What the user knows its folder, or its first file, by.
        trace_files: Its files, in the order of their names.
        run_config: exp-config.yaml or run.yaml; that of a bucket is a copy on disk.
        model_config: config.json, likewise.
        kv_files: Its files of KV-cache events.
    """

    run_id: str
    name: str
    trace_files: tuple[TraceFile, ...]
    run_config: Path | None = None
    model_config: Path | None = None
    kv_files: tuple[TraceFile, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file below a folder that is not read.

    `notable` tells what the user should hear of (logs, metrics, a link to nothing that is named like traces) from what
    simply lies there.
    """

    name: str
    reason: str
    notable: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that the user pointed at."""

    runs: tuple[RunSource, ...]
    left_out: tuple[LeftOut, ...] = ()


def clean_run_id(name: str) -> str:
    """Return `name` reduced to letters, digits, dot, underscore and dash; never empty, never a path."""
    return _UNCLEAN.sub("-", name).strip("-.")[:120] or "run"


@contextmanager
def open_inputs(
    paths: Iterable[str | Path],
    *,
    stdin: BinaryIO | None = None,
    filesystem_of: FileSystemOf = open_filesystem,
) -> Iterator[Inputs]:
    """Find the runs under the given paths.

    Files named one by one belong to the run whose configuration lies beside them; those without one make up one run
    together. Below a folder, trace files are known by their names (`traces*.json`, …) or by what is in them; a run is
    the nearest folder above them with a run configuration or, where there is none, their own folder. Folders of dates
    (`year=2026/month=02/…`, `2026/02/…`) do not count.

    Args:
        paths: Files, folders, patterns, URLs, pipes, and `-` for standard input.
        stdin: The stream that `-` stands for, in place of the process's own.
        filesystem_of: Opens object stores.

    Yields:
        The runs. What came through a pipe, and the configuration files of buckets, lie on disk until the end of the
        block: they are read more than once.

    Raises:
        UsageError: A path does not exist or cannot be read, or a folder holds no trace files.
        DataError: A file that was named holds OTLP logs or metrics.
    """
    with ExitStack() as copies:
        yield _Finder(copies, stdin, filesystem_of).find(paths)


class _Finder:
    def __init__(self, copies: ExitStack, stdin: BinaryIO | None, filesystem_of: FileSystemOf) -> None:
        self._copies = copies
        self._stdin = stdin
        self._filesystem_of = filesystem_of
        self._left_out: dict[LeftOut, None] = {}

    def find(self, paths: Iterable[str | Path]) -> Inputs:
        runs: list[RunSource] = []
        named: list[TraceFile] = []
        for path in dict.fromkeys(map(str, paths)):
            if path == STDIN or _is_pipe(path):
                runs.append(self._piped(path))
                continue
            for found in files_and_trees(path, self._filesystem_of):
                if isinstance(found, Tree):
                    runs += self._runs_in(found)
                elif _is_kv_file(found) or found.filesystem is not None:
                    # What of a bucket is not ours is refused when it is read: it is to be fetched once.
                    named.append(found)
                else:
                    contents = sniff(found)
                    refuse_other_signal(found.name, contents.signal)
                    named.append(replace(found, contents=contents))
        runs += self._named(named)
        if not runs:
            raise UsageError("no trace files were named", hint="name a run folder, or trace files")
        if len(runs) > 1:
            runs = list({tuple(map(_place, run.trace_files)): run for run in runs}.values())
        return Inputs(tuple(runs), tuple(self._left_out))

    def _named(self, files: Iterable[TraceFile]) -> list[RunSource]:
        """Make runs of files that were named one by one."""
        runs: list[RunSource] = []
        homeless: list[TraceFile] = []
        for group in named_together(_without_repeats(files)):
            events = tuple(file for file in group.files if _is_kv_file(file))
            # A pattern may have matched the configuration too.
            others = (file for file in group.files if not _is_kv_file(file))
            traces = tuple(file for file in others if _base_name(file) not in group.configs)
            if traces:
                run_id = clean_run_id(group.folder or _common_stem(traces))
                runs.append(self._source(run_id, traces[0].name, traces, events, group.configs))
            else:
                homeless += events
        if runs and homeless:
            runs[0] = replace(runs[0], kv_files=(*runs[0].kv_files, *homeless))
        return runs

    def _piped(self, path: str) -> RunSource:
        """Keep on disk what comes through a pipe."""
        try:
            with self._stream(path) as stream, self._target("stdin").open("wb") as copy:
                shutil.copyfileobj(stream, copy, _COPY_BYTES)
        except OSError as error:
            raise UsageError(
                f"cannot be kept in a temporary folder ({reason_of(error)})",
                where=shown(path),
                hint="make room there, or set TMPDIR to another",
            ) from error
        file = TraceFile.local(copy.name, name=shown(path))
        refuse_other_signal(file.name, sniff(file).signal)
        unnamed = path == STDIN or _PIPE_OF_PROCESS.fullmatch(path)
        run_id = STDIN_RUN_ID if unnamed else clean_run_id(_common_stem((file,)))
        return RunSource(run_id, file.name, (file,))

    def _stream(self, path: str) -> AbstractContextManager[BinaryIO]:
        if path != STDIN:
            return Path(path).open("rb")
        stream = self._stdin or sys.stdin.buffer
        if stream.isatty():
            raise UsageError("standard input is a terminal", hint="pipe a trace file into it")
        return nullcontext(stream)

    def _target(self, name: str) -> Path:
        """Return a path for a copy, in a folder of its own that goes away in the end."""
        return Path(self._copies.enter_context(tempfile.TemporaryDirectory(prefix="tracefit-")), name)

    def _runs_in(self, tree: Tree) -> list[RunSource]:
        configs = {leaf.parts: leaf.file for leaf in tree.leaves if leaf.parts[-1] in CONFIG_NAMES}
        configured = {parts[:-1] for parts in configs if parts[-1] in RUN_CONFIG_NAMES}
        folders: dict[tuple[str, ...], list[TraceFile]] = {}
        events: dict[tuple[str, ...], list[TraceFile]] = {}
        for leaf in tree.leaves:
            if _is_kv_file(leaf.file):
                events.setdefault(run_folder(leaf.parts[:-1], configured), []).append(leaf.file)
            elif leaf.parts not in configs and (file := self._trace_file(leaf)):
                folders.setdefault(run_folder(leaf.parts[:-1], configured), []).append(file)
        self._report(tree)
        if not folders:
            said = sorted({f" ({left.reason})" for left in self._left_out if left.notable})
            raise UsageError(
                f"holds no trace files{''.join(said)}",
                where=tree.name,
                hint="a run folder has traces*.json, .jsonl, .binpb or .pb, plain or with .gz or .zst",
            )
        return [
            self._run(tree, folder, files, events.get(folder, []), configs)
            for folder, files in sorted(folders.items())
        ]

    def _trace_file(self, leaf: Leaf) -> TraceFile | None:
        """Tell a trace file by its name, or by its head where the name says nothing or looking is cheap."""
        named = TRACE_NAME.fullmatch(leaf.parts[-1]) is not None
        if named and leaf.file.filesystem is not None:
            return leaf.file
        contents = sniff(leaf.file)
        if contents.signal != "traces":
            self._left_out[LeftOut(leaf.file.name, f"it holds OTLP {contents.signal}", notable=True)] = None
            return None
        if not (named or contents.is_traces):
            self._left_out[LeftOut(leaf.file.name, str(contents), notable=False)] = None
            return None
        return replace(leaf.file, contents=contents)

    def _report(self, tree: Tree) -> None:
        for name in tree.irregular:
            notable = TRACE_NAME.fullmatch(Path(name).name) is not None
            self._left_out[LeftOut(name, "it is no regular file", notable=notable)] = None

    def _run(
        self,
        tree: Tree,
        folder: tuple[str, ...],
        files: list[TraceFile],
        events: list[TraceFile],
        configs: dict[tuple[str, ...], TraceFile],
    ) -> RunSource:
        return self._source(
            clean_run_id(("run", *without_dates((*tree.parts, *folder)))[-1]),
            "/".join([tree.name.rstrip("/"), *folder]),
            _without_repeats(sorted(files, key=lambda file: file.name)),
            _without_repeats(sorted(events, key=lambda file: file.name)),
            {parts[-1]: file for parts, file in configs.items() if parts[:-1] == folder},
        )

    def _source(
        self,
        run_id: str,
        name: str,
        files: tuple[TraceFile, ...],
        events: tuple[TraceFile, ...],
        configs: dict[str, TraceFile],
    ) -> RunSource:
        run_config = next((configs[known] for known in RUN_CONFIG_NAMES if known in configs), None)
        return RunSource(
            run_id=run_id,
            name=name,
            trace_files=files,
            run_config=self._on_disk(run_config),
            model_config=self._on_disk(configs.get(MODEL_CONFIG_NAME)),
            kv_files=events,
        )

    def _on_disk(self, config: TraceFile | None) -> Path | None:
        if config is None or config.filesystem is None:
            return Path(config.path) if config else None
        target = self._target(Path(config.path).name)
        with config.open() as stream:
            target.write_bytes(stream.read(_MAX_CONFIG_BYTES))
        return target


def _base_name(file: TraceFile) -> str:
    return file.name.rpartition("/")[2]


def _is_kv_file(file: TraceFile) -> bool:
    return KV_NAME.fullmatch(_base_name(file)) is not None


def _is_pipe(path: str) -> bool:
    """Tell a pipe from what can be read twice.

    Raises:
        UsageError: If it is a device or a socket.
    """
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False  # a pattern, a URL, or an error that is told where files are looked for
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise UsageError("is a device or socket, not a file, folder or pipe", where=shown(path))
    return stat.S_ISFIFO(mode)


def _without_repeats(files: Iterable[TraceFile]) -> tuple[TraceFile, ...]:
    """Leave out files that are there twice, such as under a link."""
    unique: dict[str, TraceFile] = {}
    for file in files:
        unique.setdefault(_place(file), file)
    return tuple(unique.values())


def _place(file: TraceFile) -> str:
    return file.name if file.filesystem else os.path.realpath(file.path)


def _common_stem(files: tuple[TraceFile, ...]) -> str:
    stems = [_LOOSE_SUFFIXES.sub("", _base_name(file)) for file in files]
    common = stems[0]
    for stem in stems[1:]:
        while not stem.startswith(common):
            common = common[:-1]
    return common.rstrip("-._") or stems[0]
