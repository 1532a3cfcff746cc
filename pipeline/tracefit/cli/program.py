"""The program itself: its name, its help, and where the values of its options come from.

Options come from flags, then from environment variables (`TRACEFIT_BETA_TARGET` for `--beta-target`), then from the
configuration file of `--config`, under the names of the flags.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer
from typer.core import TyperGroup, TyperOption

from tracefit import console
from tracefit._version import __version__
from tracefit.cli.arguments import parameter_of, parameters_of
from tracefit.console import CONFIG_FILE, LogLevel, set_log_level, warn
from tracefit.engines.cores import keep_here
from tracefit.errors import UsageError, did_you_mean, set_command
from tracefit.memory import are_small, use_one_thread
from tracefit.options import LOCAL, EngineChoice, from_flags, is_positional

PREFIX = "TRACEFIT_"

# A file that asks for help or the version would end every command, and one that names another file may name itself.
_NOT_SETTABLE = {"help", "version", "config", "install_completion", "show_completion"}


class Commands(TyperGroup):
    """A group of commands whose options can also be set by environment or configuration file."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for holder in (self, *self.commands.values()):
            for option in _options(holder):
                if _settable(option) or option.name == "config":
                    option.envvar = variable(flag(option))
                    # The help of the program says the rule once; a variable in each line would hide the text.
                    option.show_envvar = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse empty values: an empty path would be the working folder."""
        for before, value in pairwise(["", *args]):
            if value == "" or (value.startswith("--") and value.endswith("=")):
                raise UsageError(f"{value.rstrip('=') or before}: is empty")
        return super().resolve_command(ctx, args)

    def variables(self) -> set[str]:
        """Return the names of all environment variables that set an option."""
        holders = (self, *self.commands.values())
        return {str(o.envvar) for holder in holders for o in _options(holder) if o.envvar}

    def owners(self, running: str | None) -> dict[str, str]:
        """Return the flags that a command lacks, each with the first command that has it."""
        flags = {name: {f"--{flag(o)}" for o in _options(one)} for name, one in (("", self), *self.commands.items())}
        here = flags[""] | flags.get(running or "", set())
        return {text: name for name in reversed(flags) for text in flags[name] - here}


def flag(option: TyperOption) -> str:
    """Return the long name of an option, without dashes."""
    return max(option.opts, key=len).lstrip("-")


def variable(name: str) -> str:
    """Return the environment variable that sets the option of this name."""
    return PREFIX + name.replace("-", "_").upper()


def _options(holder: Any) -> list[TyperOption]:
    return [p for p in holder.params if isinstance(p, TyperOption)]


def _settable(option: TyperOption) -> bool:
    return option.name not in _NOT_SETTABLE


_MAX_OPTIONS_BYTES = 64 * 1024
"""Every option of every command fits many times; a dotted key of so many parts still takes under a second."""


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take defaults of options from a configuration file: the callback of `--config`.

    Raises:
        UsageError: The file cannot be read, is not TOML, or names something that is not an option.
    """
    if path is None or context.resilient_parsing:
        return path
    commands = context.find_root().command
    assert isinstance(commands, Commands)  # noqa: S101 - the program sets `cls` of the root
    defaults = _defaults(_read(path), commands, str(path))
    context.meta[CONFIG_FILE] = str(path)
    # Before a command's name typer reads defaults by command, after it those of the command.
    context.default_map = defaults if context.command is commands else defaults[context.info_name or ""]
    return path


def _read(path: Path) -> dict[str, Any]:
    # Not at the top: it brings libraries that a command without a configuration file may not need.
    import tomllib

    from tracefit.server.documents import as_text, read_bytes

    text = as_text(read_bytes(path, limit_bytes=_MAX_OPTIONS_BYTES), where=str(path))
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError("is nested too deeply", where=str(path)) from None
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise UsageError(f"is not TOML: {error}", where=str(path)) from error


def _defaults(document: dict[str, Any], commands: Commands, where: str) -> dict[str, dict[str, Any]]:
    """Sort the file's keys by command: a key at the top goes to every command with that option."""
    options = {name: {flag(o): o for o in _options(c) if _settable(o)} for name, c in commands.commands.items()}
    shared = {k: v for k, v in document.items() if not (k in options and isinstance(v, dict))}
    _require_known(shared, {f for known in options.values() for f in known} | set(options), where)
    defaults = {}
    for name, known in options.items():
        section = document.get(name, {}) if isinstance(document.get(name), dict) else {}
        _require_known(section, set(known), where, f"[{name}] ")
        values = {**{k: v for k, v in shared.items() if k in known}, **section}
        defaults[name] = {str(known[k].name): _value(known[k], v) for k, v in values.items()}
    return defaults


def _require_known(values: dict[str, Any], known: set[str], where: str, section: str = "") -> None:
    for key in values:
        if key not in known:
            raise UsageError(
                f"{section}{key}: no such option",
                where=where,
                hint=did_you_mean(key, known) or "use the names of the flags, without the dashes",
            )


def _value(option: TyperOption, value: Any) -> Any:
    """Write `[set]` tables as the KEY=VALUE pairs the flag takes."""
    if option.multiple and isinstance(value, dict):
        return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in value.items()]
    return value


def unknown_variables(commands: Commands) -> list[str]:
    """Name the `TRACEFIT_` variables that are set but belong to no option."""
    known = commands.variables()
    return [
        f"{name} is set, but there is no such option" + (f"; {hint}" if (hint := did_you_mean(name, known)) else "")
        for name in sorted(os.environ)
        # The plugin of vLLM has other variables.
        if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}VLLM") and name not in known
    ]


_HELP = """From vLLM OpenTelemetry traces to latency coefficients you can trust.

Every option can also be set by an environment variable (`TRACEFIT_BETA_TARGET` for `--beta-target`) or in the TOML file
of `--config` (`beta-target = "clock"`, at the top for every command or below `[run]` for one). A flag takes precedence
over the environment, and the environment over the file.

Exit codes: 0 done; 1 the data cannot support the result; 2 wrong usage, or the result could not be written to standard
output; 3 done, but some data are missing or were left out (unreadable records, implausible values, events that the
server's SDK dropped, duplicate spans, requests that the receiver refused); 4 a defect of tracefit itself, in one line
to report; 130 interrupted; 141 the reader of standard output is gone.
"""

app = typer.Typer(
    name="tracefit",
    cls=Commands,
    help=_HELP,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # rich and its Markdown take longer to import than help may take
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:  # typer calls it so
    if value:
        typer.echo(f"tracefit {__version__}")
        raise typer.Exit


def _log_level(context: typer.Context, level: LogLevel | None) -> LogLevel | None:
    if level is not None and not context.resilient_parsing:
        set_log_level(level)
    return level


_Config = Annotated[
    Optional[Path],
    typer.Option(callback=use_config, is_eager=True, help="TOML file of options, named like the flags."),
]
_LogLevel = Annotated[
    Optional[LogLevel],
    typer.Option(callback=_log_level, help="Level of the log on stderr; warning if not given."),
]


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    config: _Config = None,
    log_level: _LogLevel = None,
) -> None:
    if isinstance(context.command, Commands):
        set_command(context.command.owners(context.invoked_subcommand))
        for text in unknown_variables(context.command):
            warn(text)


def _listed(value: str | Path | list[str] | None) -> list[str]:
    return [str(value)] if isinstance(value, str | Path) else value or []


def _wants_others(values: dict[str, Any], declared: tuple[type, ...]) -> bool:
    """Return whether a command is asked to give its work to other processes."""
    is_elsewhere = EngineChoice in declared and from_flags(EngineChoice, values) != LOCAL
    return is_elsewhere or values.get("workers") is not None


JsonFlag = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary on stdout.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]

_Command = TypeVar("_Command", bound=Callable[..., tuple[object, str]])


def command(task: str, *declared: type, is_quiet: bool = True) -> Callable[[_Command], _Command]:
    """Make a function a command, with the options of some classes before its keyword-only ones.

    The function gets the terminal, its arguments and, as `**options`, the values of the classes. It returns a result,
    and its text for a terminal.

    Args:
        task: The command and its input, with arguments in braces: for the line of an unexpected error.
        declared: The classes.
        is_quiet: Whether the result may be left unshown.
    """

    def register(function: _Command) -> _Command:
        signature = inspect.signature(function, eval_str=True)
        _, *arguments = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        last = [p for p in arguments if p.kind is p.KEYWORD_ONLY]
        inputs = [p.name for p in arguments if is_positional(p.annotation)]

        def call(*, json: bool, quiet: bool = False, config: object, log_level: object, **values: Any) -> None:
            with console.command(task.format_map(values), quiet=quiet) as terminal:
                # The libraries of a command take a second or two to import.
                terminal.stage("starting")
                if inputs and are_small(path for name in inputs for path in _listed(values[name])):
                    use_one_thread()
                    if not _wants_others(values, declared):
                        keep_here()
                result, text = function(terminal, **values)
                terminal.show(result, text, as_json=json)

        # The attributes that typer reads, in the order of the help. Callbacks implement the last two. The program takes
        # them only before the name of a command, so every command has them too.
        parameters = [
            *(parameter_of(p.name, p.annotation, p.default) for p in arguments[: len(arguments) - len(last)]),
            *(parameter for each in declared for parameter in parameters_of(each)),
            *(parameter_of(p.name, p.annotation, p.default) for p in last),
            parameter_of("json", JsonFlag, default=False),
            *([parameter_of("quiet", _Quiet, default=False)] if is_quiet else []),
            parameter_of("config", _Config, None),
            parameter_of("log_level", _LogLevel, None),
        ]
        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typeshed declares no __signature__ of functions
        app.command()(call)
        return function

    return register
