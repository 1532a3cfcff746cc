"""Turn the paths a user names into runs, each with its trace files, configuration files and KV-event files.

`open_inputs` accepts files, folders, glob patterns, URLs of object stores, pipes and standard input. It decides which
files are traces, and which of them belong to one run, by the folders they lie in.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import msgspec
from msgspec.structs import replace

from tracefit.errors import DataError, UsageError
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.files import (
    TraceFile,
    cannot_open,
    display_name,
    reason_of,
    split_url,
    unknown_url,
)
from tracefit.inputs.folders import (
    CONFIG_NAMES,
    MODEL_CONFIG_NAME,
    RUN_CONFIG_NAMES,
    FileSystemOf,
    Folder,
    FolderParts,
    clean_run_id,
    find_local,
    find_remote,
    open_filesystem,
)
from tracefit.inputs.formats import asked_for, holds_parts, is_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STDIN = "-"

_TRACE_NAME = re.compile(r"traces.*\.(json|jsonl|binpb|pb)(\.(gz|zst))?")
_KEYED_FOLDER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*=.*")
_YEAR, _TWO_DIGITS = re.compile(r"(19|20)\d\d"), re.compile(r"\d\d")
_LOOSE_SUFFIXES = re.compile(r"(\.(json|jsonl|binpb|pb|gz|zst))+$")
_MAX_MODEL_CONFIG_BYTES = 16 << 20
_PIPE_OF_PROCESS = re.compile(r"/dev/(fd/\d+|stdin)|/proc/(self|\d+)/fd/\d+")


class RunSource(msgspec.Struct, frozen=True):
    """One run on disk or in a bucket.

    Attributes:
        run_id: Its cleaned name; two runs may have the same.
        name: The name shown to the user: of its folder, or of its first file.
        trace_files: Its files, in the order of their names.
        run_configs: exp-config.yaml and run.yaml, as far as they are there; for a bucket, copies on disk.
        model_config: config.json, likewise.
        kv_files: Its files of KV-cache events.
        folder: The location of its folder, to distinguish runs of the same name; None for files named one by one.
    """

    run_id: str
    name: str
    trace_files: tuple[TraceFile, ...]
    run_configs: tuple[Path, ...] = ()
    model_config: Path | None = None
    kv_files: tuple[TraceFile, ...] = ()
    folder: str | None = None


class LeftOut(msgspec.Struct, frozen=True):
    """A file below a folder that is not read; `is_notable` if the user should know (logs, metrics, a broken link)."""

    name: str
    reason: str
    is_notable: bool


class Inputs(msgspec.Struct, frozen=True):
    """All runs under the paths a user named."""

    runs: tuple[RunSource, ...]
    left_out: tuple[LeftOut, ...] = ()


@contextmanager
def open_inputs(
    paths: str | Path | Iterable[str | Path],
    *,
    stdin: BinaryIO | None = None,
    filesystem_of: FileSystemOf = open_filesystem,
    is_known: Callable[[TraceFile], bool] = lambda _: False,
) -> Iterator[Inputs]:
    """Find the runs under the given paths.

    Files named one by one belong to the run whose configuration lies beside them; files without a configuration form
    one run together. Below a folder, trace files are recognised by name (`traces*.json`, …) or by content; their run is
    the nearest folder above them with a run configuration or, without one, their own folder. Folders of dates
    (`year=2026/month=02/…`, `2026/02/…`) do not count.

    Args:
        paths: Files, folders, patterns, URLs, pipes, and `-` for standard input.
        stdin: The stream that `-` stands for, in place of the process's own.
        filesystem_of: Opens object stores.
        is_known: Says of a file below a folder whether it is known to hold traces: it is not opened then.

    Yields:
        The runs. Copies of piped input and of configuration files in buckets stay on disk until the block ends, because
        they are read more than once.

    Raises:
        UsageError: A path does not exist or cannot be read, or a folder holds no trace files.
        DataError: A named file holds OTLP logs or metrics.
    """
    with ExitStack() as copies:
        if isinstance(paths, str | Path):  # a string is one path, not its letters
            paths = [paths]
        yield _FileFinder(copies, stdin, filesystem_of, is_known).find(paths)


def refuse_other_signal(file: TraceFile) -> None:
    """Refuse a file that holds another signal than traces.

    Raises:
        DataError: If it holds OTLP logs or metrics.
    """
    if (signal := inspect_file(file).signal) != "traces":
        raise DataError(f"holds OTLP {signal}, not traces", where=file.name, hint="leave it out of the input")


class _FileFinder:
    def __init__(
        self,
        copies: ExitStack,
        stdin: BinaryIO | None,
        filesystem_of: FileSystemOf,
        is_known: Callable[[TraceFile], bool],
    ) -> None:
        self._copies = copies
        self._stdin = stdin
        self._filesystem_of = filesystem_of
        self._is_known = is_known
        self._left_out: dict[LeftOut, None] = {}

    def find(self, paths: Iterable[str | Path]) -> Inputs:
        runs: list[RunSource] = []
        named: list[TraceFile] = []
        for path in dict.fromkeys(map(str, paths)):
            if path == STDIN or _is_pipe(path):
                runs.append(self._piped(path))
                continue
            for match in _find(path, self._filesystem_of):
                if isinstance(match, Folder):
                    runs += self._runs_in(match)
                    continue
                # A remote file is read once, while it is copied: its signal is checked then.
                if match.filesystem is None and not is_beside(_base_name(match)):
                    refuse_other_signal(match)
                named.append(match)
        named = self._without_parts(named)
        known = {file.location for run in runs for file in (*run.trace_files, *run.kv_files)}
        # Together: several files of one folder are one run.
        runs += self._runs_of([file for file in named if file.location not in known])
        if not runs:
            raise UsageError("no trace files were named", hint="name a run folder, or trace files")
        unique = {tuple(file.location or file.path for file in run.trace_files): run for run in runs}
        return Inputs(tuple(unique.values()), tuple(self._left_out))

    def _runs_of(self, files: list[TraceFile]) -> list[RunSource]:
        """Return the runs of files that were named one by one."""
        runs: list[RunSource] = []
        unassigned: list[TraceFile] = []
        groups: dict[str, list[TraceFile]] = {}
        configs: dict[str, dict[str, TraceFile]] = {}
        for file in _without_repeats(files):
            folder = _folder_of(file)
            if folder not in configs:
                configs[folder] = _configs_in(file)
            beside = configs[folder]
            is_configured = any(name in beside for name in RUN_CONFIG_NAMES)
            groups.setdefault(folder if is_configured else "", []).append(file)
        for folder, group in groups.items():
            kv_files = [file for file in group if _is_beside(file)]
            # A pattern such as `run/*` also matches configuration files, which have no traces.
            beside = configs[folder] if folder else {}
            traces = [file for file in group if file not in kv_files and _base_name(file) not in beside]
            if traces:
                name = folder.rpartition("/")[2] or _common_stem(traces)
                runs.append(self._run(name, traces[0].name, traces, kv_files, beside, None))
            else:
                unassigned += kv_files
        # KV events without traces beside them: only the order of the paths says which run they belong to.
        if runs and unassigned:
            runs[0] = replace(runs[0], kv_files=(*runs[0].kv_files, *unassigned))
        return runs

    def _piped(self, path: str) -> RunSource:
        """Return a run of the bytes of a pipe, copied to disk."""
        try:
            with self._stream(path) as stream, self._target("stdin").open("wb") as copy:
                shutil.copyfileobj(stream, copy, 1 << 20)
        except OSError as error:
            raise UsageError(
                f"cannot be kept in a temporary folder ({reason_of(error)})",
                where=display_name(path),
                hint="make room there, or set TMPDIR to another",
            ) from error
        file = TraceFile.local(copy.name, name=display_name(path))
        refuse_other_signal(file)
        is_unnamed = path == STDIN or _PIPE_OF_PROCESS.fullmatch(path)
        run_id = "stdin" if is_unnamed else clean_run_id(_common_stem([file]))
        return RunSource(run_id, file.name, (file,))

    def _stream(self, path: str) -> AbstractContextManager[BinaryIO]:
        if path != STDIN:
            return Path(path).open("rb")
        stream = self._stdin or sys.stdin.buffer
        if stream.isatty():
            raise UsageError("standard input is a terminal", hint="pipe a trace file into it")
        return nullcontext(stream)

    def _target(self, name: str) -> Path:
        """Return a path for a copy, in a folder of its own that is removed in the end."""
        return Path(self._copies.enter_context(tempfile.TemporaryDirectory(prefix="tracefit-")), name)

    def _runs_in(self, folder: Folder) -> list[RunSource]:
        configs = {parts: file for parts, file in folder.files if parts[-1] in CONFIG_NAMES}
        configured = {parts[:-1] for parts in configs if parts[-1] in RUN_CONFIG_NAMES}
        beside: dict[FolderParts, dict[str, TraceFile]] = {}
        for parts, file in configs.items():
            beside.setdefault(parts[:-1], {})[parts[-1]] = file
        traces: dict[FolderParts, list[TraceFile]] = {}
        kv_files: dict[FolderParts, list[TraceFile]] = {}
        below = {parts for parts, _ in folder.files}
        for parts, file in folder.files:
            run = _run_folder(parts[:-1], configured)
            if _whole_of(parts) in below and self._is_part(file, parts[-3]):
                continue
            if is_beside(_base_name(file)):
                kv_files.setdefault(run, []).append(file)
            elif parts not in configs and (kind := self._kind_of(file)):
                (traces if kind == "decoded" else kv_files).setdefault(run, []).append(file)
        for name in folder.irregular:
            base = Path(name).name
            if base in CONFIG_NAMES:
                raise UsageError("is not a regular file", where=name, hint="a configuration is read from a file")
            is_notable = _TRACE_NAME.fullmatch(base) is not None
            self._left_out[LeftOut(name, "it is not a regular file", is_notable)] = None
        if not traces:
            reasons = sorted({f" ({left.reason})" for left in self._left_out if left.is_notable})
            raise UsageError(
                f"holds no trace files{''.join(reasons)}",
                where=folder.name,
                hint=f"a run folder has traces*.json, .jsonl, .binpb or .pb, {asked_for()}, plain or with .gz or .zst",
            )
        return [
            self._run(
                ("run", *_without_dates((*folder.parts, *run)))[-1],
                "/".join([folder.name.rstrip("/"), *run]),
                _without_repeats(sorted(files, key=lambda file: file.name)),
                _without_repeats(sorted(kv_files.get(run, []), key=lambda file: file.name)),
                beside.get(run, {}),
                folder.location_of(run),
            )
            for run, files in sorted(traces.items())
        ]

    def _kind_of(self, file: TraceFile) -> Literal["decoded", "beside"] | None:
        """Return by name or content whether a file is decoded or read beside decoded ones; null if neither."""
        # Files in a bucket are not opened to decide: that costs a round trip for each.
        is_named = _matches(_TRACE_NAME, file)
        if (is_named and file.filesystem is not None) or self._is_known(file):
            return "decoded"
        contents = inspect_file(file, is_shape_needed=not is_named)
        if contents.recording is not None:
            return "decoded" if contents.recording.decode else "beside"
        if contents.signal != "traces":
            self._left_out[LeftOut(file.name, f"it holds OTLP {contents.signal}", is_notable=True)] = None
            return None
        if not (is_named or contents.is_traces):
            self._left_out[LeftOut(file.name, str(contents), is_notable=bool(contents.known))] = None
        return "decoded" if is_named or contents.is_traces else None

    def _without_parts(self, files: list[TraceFile]) -> list[TraceFile]:
        at = [tuple((file.location or file.path).split("/")) for file in files]
        there = set(at)
        return [
            file
            for file, parts in zip(files, at, strict=True)
            if _whole_of(parts) not in there or not self._is_part(file, parts[-3])
        ]

    def _is_part(self, file: TraceFile, folder: str) -> bool:
        """Return whether a file holds a part of a run whose whole is read from another one; it is left out then."""
        if not holds_parts(folder) or not (found := inspect_file(file).recording) or found.parts_in != folder:
            return False
        reason = (
            f"it is of one part of the run, which the file above {folder}/ has whole; give its folder alone to read it"
        )
        self._left_out[LeftOut(file.name, reason, is_notable=True)] = None
        return True

    def _run(
        self,
        run_name: str,
        name: str,
        traces: list[TraceFile],
        kv_files: list[TraceFile],
        configs: dict[str, TraceFile],
        folder: str | None,
    ) -> RunSource:
        return RunSource(
            run_id=clean_run_id(run_name),
            name=name,
            trace_files=tuple(traces),
            run_configs=tuple(self._on_disk(configs[name]) for name in RUN_CONFIG_NAMES if name in configs),
            model_config=self._on_disk(configs[MODEL_CONFIG_NAME]) if MODEL_CONFIG_NAME in configs else None,
            kv_files=tuple(kv_files),
            folder=folder,
        )

    def _on_disk(self, config: TraceFile) -> Path:
        if config.filesystem is None:
            return Path(config.path)
        target = self._target(Path(config.path).name)
        with config.open() as stream:
            target.write_bytes(stream.read(_MAX_MODEL_CONFIG_BYTES))
        return target


def _find(path: str, filesystem_of: FileSystemOf) -> list[TraceFile | Folder]:
    """Return the files and folders that a path, a pattern or a URL matches."""
    scheme, rest = split_url(path)
    if scheme == "file":
        return find_local(rest)
    if scheme not in ("s3", "gs"):
        raise unknown_url(scheme, rest)
    return find_remote(scheme, rest, filesystem_of)


def _is_pipe(path: str) -> bool:
    """Return whether a path is a pipe, which can be read only once; refuse a device or a socket."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False  # a pattern, a URL, or an error that is reported where files are looked for
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise UsageError("is a device or socket, not a file, folder or pipe", where=display_name(path))
    return stat.S_ISFIFO(mode)


def _folder_of(file: TraceFile) -> str:
    """Return the location of the run folder that a file that was named lies in; for a link, where the link lies."""
    if file.filesystem is None:
        return _above_dates(os.path.realpath(os.path.dirname(file.path)))  # noqa: PTH120 - of strings
    return _above_dates((file.location or file.path).rpartition("/")[0])


def _above_dates(folder: str) -> str:
    return "/".join(_without_dates(tuple(folder.split("/"))))


def _configs_in(beside: TraceFile) -> dict[str, TraceFile]:
    """Return the configuration files of the run folder that a file that was named lies in, by their names."""
    folder = _folder_of(beside) if beside.filesystem is None else _above_dates(beside.path.rpartition("/")[0])
    paths = {name: f"{folder}/{name}" for name in CONFIG_NAMES}
    if beside.filesystem is None:
        there = {name: path for name, path in paths.items() if os.path.lexists(path) and not Path(path).is_dir()}
        return {name: TraceFile.local(path) for name, path in there.items()}
    try:
        infos = beside.filesystem.get_file_info(list(paths.values()))
    except OSError as error:
        raise cannot_open(beside.name, error) from error
    return {
        name: TraceFile(display_name(info.path), info.path, info.size, filesystem=beside.filesystem)
        for name, info in zip(paths, infos, strict=True)
        if info.is_file
    }


def _base_name(file: TraceFile) -> str:
    return file.name.rpartition("/")[2]


def _matches(pattern: re.Pattern[str], file: TraceFile) -> bool:
    return pattern.fullmatch(_base_name(file)) is not None


def _is_beside(file: TraceFile) -> bool:
    """Return whether a file that was named is read when the run's tables are built; one in a bucket goes by its
    name.
    """
    if (is_named := is_beside(_base_name(file))) or file.filesystem is not None:
        return is_named
    recording = inspect_file(file).recording
    return recording is not None and recording.decode is None


def _without_repeats(files: list[TraceFile]) -> list[TraceFile]:
    """Drop files that occur twice, such as under a link."""
    unique: dict[str | None, TraceFile] = {}
    for file in files:
        unique.setdefault(file.location, file)
    return list(unique.values())


def _run_folder(folder: FolderParts, configured: set[FolderParts]) -> FolderParts:
    """Return the folder of the run whose files lie in `folder`: the nearest one above with a run configuration."""
    above = (folder[:depth] for depth in range(len(folder), -1, -1))
    return next((each for each in above if each in configured), _without_dates(folder))


def _whole_of(parts: FolderParts) -> FolderParts:
    """Return where the whole of a run lies whose parts are in folders of their own: `run/x.json` for
    `run/phases/warmup/x.json`.
    """
    return (*parts[:-3], parts[-1]) if len(parts) > 2 else ()


def _without_dates(folders: FolderParts) -> FolderParts:
    """Drop trailing folders named after the time: `year=…/month=…/…`, or only numbers, as in `2026/02`."""
    while folders and _KEYED_FOLDER.fullmatch(folders[-1]):
        folders = folders[:-1]
    digits = len(folders)
    while digits and _TWO_DIGITS.fullmatch(folders[digits - 1]):
        digits -= 1
    # Two digits are a date only after a year.
    is_date = 0 < digits < len(folders) and _YEAR.fullmatch(folders[digits - 1])
    return folders[: digits - 1] if is_date else folders


def _common_stem(files: Iterable[TraceFile]) -> str:
    """Return the common prefix of the names of files without a run folder, or else the stem of the first."""
    stems = [_LOOSE_SUFFIXES.sub("", _base_name(file)) for file in files]
    return os.path.commonprefix(stems).rstrip("-._") or stems[0]  # noqa: RUF071 - names, not paths
