"""Output of the command line: progress, logs and errors on stderr, results on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import io
import json
import logging
import os
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer
from typer.exceptions import TyperException

from tracefit._version import __version__
from tracefit.errors import TracefitError, UsageError, naming_flags, printable, without_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

INTERRUPTED, SIGPIPE = 130, 141
"""Exit codes of commands that a signal ended, as in a shell."""
UNEXPECTED = 4
"""Exit code of an internal error."""
CONFIG_FILE = "tracefit.config"
"""Key of a command's context for the configuration file of its defaults."""

_log = logging.getLogger("tracefit")


LogLevel = Literal["debug", "info", "warning", "error"]
"""How much is logged."""


class _Stderr(logging.Handler):
    """Writes one line per record to the current stderr, which may have been replaced since the start."""

    # The traceback of an error stands below its line, as it would in a log file.
    def emit(self, record: logging.LogRecord) -> None:
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        _on_stderr(f"{record.levelname.lower()}: {record.getMessage()}\n{trace}")


def set_log_level(level: LogLevel) -> None:
    """Log records of this level and above on stderr."""
    _log.setLevel(level.upper())
    if not _log.handlers:
        _log.addHandler(_Stderr())
        # Handlers of the root logger, from a notebook or a test, would print each line again.
        _log.propagate = False


def warn(text: str) -> None:
    """Log a warning."""
    if not _log.handlers:
        set_log_level("warning")
    _log.warning("%s", printable(text))


class Terminal:
    """Progress for a person: a changing line on a terminal, logs elsewhere; warnings always, unless quiet.

    Args:
        quiet: Show nothing.
        task: The command and its input, for the line of an unexpected error.
    """

    def __init__(self, *, quiet: bool, task: str = "") -> None:
        self.quiet = quiet
        self._task = task
        self._line: tuple[Progress, TaskID] | None = None
        self._done = 0
        self._expected = 0
        self._in_bytes = True
        self._stage = ""
        self._note = ""

    def stage(self, text: str) -> None:
        """Show the stage of work that begins."""
        self._stage, self._note = text, ""
        _log.info("%s", text)
        if self._in_bytes or self._done >= self._expected:
            self.expect(0)
        else:  # one of several stages of the parts
            self._show()

    def note(self, text: str) -> None:
        """Show the progress of the stage after its name."""
        self._note = text
        _log.debug("%s", text)
        self._show()

    def expect(self, size_bytes: int) -> None:
        """Show a bar with the share of these bytes that is read, the rate, and the remaining time."""
        self._begin(size_bytes, in_bytes=True)

    def expect_parts(self, parts: int) -> None:
        """Show a bar with the share of these parts that is done, and the remaining time."""
        self._begin(parts, in_bytes=False)

    def _begin(self, expected: int, *, in_bytes: bool) -> None:
        # A bar and a spinner are two kinds of line: one cannot become the other.
        if expected or self._expected:
            self.close()
        self._expected, self._done, self._in_bytes = expected, 0, in_bytes
        self._show()

    def read(self, size_bytes: int) -> None:
        """Show how much has been read."""
        self._done += size_bytes
        _log.debug("%s bytes read", f"{self._done:,}")
        self._show()

    def finish_part(self) -> None:
        """Show that one part is done."""
        self._done += 1
        self._show()

    def warn(self, text: str) -> None:
        """Print a warning on its own line."""
        if not self.quiet:
            self.close()
            warn(text)

    @property
    def activity(self) -> str:
        """The command, its input, and its current stage."""
        return ": ".join(text for text in (self._task, self._stage) if text)

    def show(self, result: Any, text: str, *, as_json: bool) -> None:
        """Print a result as JSON or text, nothing when quiet; exit with its code unless that is 0."""
        self.close()
        if as_json:
            _on_stdout(json.dumps(result, indent=2, default=_plain) + "\n")
        elif not self.quiet:
            # Ids in traces and names in coefficient files are untrusted: a terminal must not obey them.
            lines = text.rstrip().split("\n")
            _on_stdout("".join(f"{printable(line)}\n" for line in lines))
        if code := getattr(result, "exit_code", 0):
            raise typer.Exit(code)

    def close(self) -> None:
        """Remove the changing line."""
        if self._line is not None:
            self._line[0].stop()
            self._line = None

    def _show(self) -> None:
        if self._line is None:
            # Checked first: rich replaces stderr by its stream, which is not a terminal in older versions.
            if self.quiet or not sys.stderr.isatty() or _log.isEnabledFor(logging.INFO):
                return
            self._line = _changing_line(self._expected, in_bytes=self._in_bytes)
        progress, task = self._line
        description = f"{self._stage}: {self._note}" if self._note else self._stage
        progress.update(task, description=description, completed=min(self._done, self._expected))


def _changing_line(expected: int, *, in_bytes: bool) -> tuple[Progress, TaskID]:
    """Start a spinner, or a bar if the number of bytes or parts is known."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    text = TextColumn("{task.description}")
    done = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    bar = (text, BarColumn(), *done, TimeRemainingColumn())
    columns = bar if expected else (SpinnerColumn(), text, TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress, progress.add_task("", total=expected or None)


@contextmanager
def command(task: str, *, quiet: bool = False) -> Iterator[Terminal]:
    """Run a command: any error ends it with one line and an exit code."""
    terminal = Terminal(quiet=quiet, task=task)
    try:
        yield terminal
    except (typer.Exit, typer.Abort, TyperException, SystemExit):
        raise
    # Here, not only in `run_program`: typer would handle an interrupt and a closed pipe itself.
    except BaseException as error:
        # Rust has already written the text of a panic to file descriptor 2. Buffering that would also hide
        # why a process was aborted, for example out of memory.
        terminal.close()
        raise typer.Exit(_exit_code(error, terminal.activity)) from error
    finally:
        terminal.close()


def run_program(app: typer.Typer) -> int:
    """Run the program and return its exit code; errors in the command line itself are one line too.

    Warnings of Python and of libraries are for developers: they go to the debug log.
    """
    _open_streams()
    with warnings.catch_warnings():
        warnings.showwarning = _log_warning
        try:
            with naming_flags():
                return _call(app)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort
            return _exit_code(error)
        finally:
            set_log_level("warning")


def _call(app: typer.Typer) -> int:
    _require_working_folder()
    try:
        code = int(app(standalone_mode=False, prog_name="tracefit") or 0)
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            _on_stdout(error.message)
        else:
            _say(usage_line(error))
        code = error.exit_code
    except SystemExit as error:
        # typer ends a help text whose reader has gone this way, with the exit code of data that cannot support a
        # result.
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    except OSError as error:
        # Commands report their errors, so this is a help text or the version that typer could not write.
        raise _unwritable(error) from error
    _on_stdout("")
    return code


def _exit_code(error: BaseException, activity: str = "") -> int:
    """Report an error in one line, and return the exit code it stands for."""
    if isinstance(error, TracefitError):
        _say(error.line())
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        # The reader of stdout, such as `head`, has enough.
        _silence(sys.stdout)
        return SIGPIPE
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    return _unexpected(error, activity)


def _on_stdout(text: str) -> None:
    """Write a result and flush it: a failure at the interpreter's end would have another exit code."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> UsageError:
    _silence(sys.stdout)
    why = os.strerror(error.errno or errno.EIO)
    return UsageError(f"cannot be written ({why})", where="standard output")


def _open_streams() -> None:
    """Make streams that accept every text: one without Unicode escapes it, a closed stderr discards it.

    A closed stdout stays closed: a result that is not written is not a success.
    """
    for name, mode in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        stream = getattr(sys, name)
        if stream is None:
            # Open for the program's lifetime under the free number, so that no other file receives text meant
            # for a terminal.
            setattr(sys, name, os.fdopen(os.open(os.devnull, mode), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _require_working_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError("the working folder is gone", hint="change to an existing folder") from error


def _silence(stream: TextIO) -> None:
    """Discard the buffered rest of a broken stream, so that it cannot fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _on_stderr(text: str) -> None:
    """Write to stderr; if that fails, only the exit code shows how the command ended."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    _log.debug("%s:%s: %s: %s", filename, lineno, category.__name__, message)


def _unexpected(error: BaseException, activity: str) -> int:
    """Report an unexpected error: the task, the position in the code, and advice."""
    _log.debug("%s", "".join(traceback.format_exception(error)).rstrip())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f"{os.sep}tracefit{os.sep}" in f.filename] or frames
    text = without_credentials(" ".join(str(error).split()))[:_MOST_TEXT]
    what = f"{type(error).__name__} ({text})" if text else type(error).__name__
    where = f" in {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    task = f"{without_credentials(activity)}: " if activity else ""
    line = (
        f"{task}unexpected {what}{where}; this is a defect of tracefit {__version__}; earlier results on disk are "
        "unharmed; report this line as CONTRIBUTING.md says; --log-level debug shows the traceback"
    )
    _say(printable(line))
    return UNEXPECTED


_MOST_TEXT = 300
"""Characters shown of an unexpected error: a message may contain a whole table."""


def _say(line: str) -> None:
    _on_stderr(f"tracefit: {line}\n")


def usage_line(error: TyperException) -> str:
    """Describe an error in the command line in one line: its source, the fault and advice."""
    text = error.format_message().strip().rstrip(".")
    close = getattr(error, "possibilities", None)
    if hasattr(error, "option_name"):
        text = str(error.message)
    text = text.replace(". Did you mean", "; did you mean").replace("Value error, ", "")
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    where = _source(context, param)
    if close:
        (nearest,) = difflib.get_close_matches(getattr(error, "option_name", ""), close, n=1, cutoff=0)
        hint = f"; did you mean {nearest}?"
    elif "did you mean" in text or context is None:
        hint = ""
    else:
        hint = f"; see `{context.command_path} --help`"
    return " ".join(f"{where}{text[:1].lower()}{text[1:]}{hint}".split())


def _source(context: Any, param: Any) -> str:
    """Return the variable or file of a wrong value; empty for a flag."""
    if context is None or param is None or param.name is None:
        return ""
    source = context.get_parameter_source(param.name)
    kind = source.name if source is not None else ""
    if kind == "ENVIRONMENT":
        return f"{param.envvar}: "
    return f"{context.meta.get(CONFIG_FILE)}: " if kind == "DEFAULT_MAP" else ""


def _plain(value: Any) -> Any:
    """Convert values to JSON types; a result gets its exit code as a last key."""
    if dataclasses.is_dataclass(value):
        code = getattr(value, "exit_code", None)
        plain = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain if code is None else {**plain, "exit_code": code}
    if isinstance(value, Path):
        return str(value)
    # A frame of up to a million rows: they become dicts only for JSON.
    if hasattr(value, "to_dicts"):
        return value.to_dicts()
    raise TypeError(f"{type(value).__name__} cannot be part of a result")
