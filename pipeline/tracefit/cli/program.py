"""The program itself: its name, its help, and the options before a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from tracefit._version import __version__
from tracefit.console import LogLevel, set_log_level, warn
from tracefit.options import Commands, unknown_variables, use_config

_HELP = """From vLLM OpenTelemetry traces to latency coefficients you can trust.

Every option can also be set by an environment variable (`TRACEFIT_BETA_TARGET` for `--beta-target`) or in the TOML file
of `--config` (`beta-target = "clock"`, at the top for every command or below `[run]` for one). A flag takes precedence over
the environment, the environment over the file.

Exit codes: 0 done; 1 the data cannot support the result; 2 usage; 3 done, with something in quarantine (unreadable
records, implausible values, events the server's SDK dropped, duplicate spans); 4 a defect of tracefit itself, in one line to
report; 130 interrupted.
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


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[  # the callbacks implement these options
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    config: Annotated[
        Optional[Path],
        typer.Option(
            callback=use_config, is_eager=True, help="TOML file of options, under the flags' names."
        ),
    ] = None,
    log_level: Annotated[
        Optional[LogLevel],
        typer.Option(callback=_log_level, help="What is logged on stderr; warning if not given."),
    ] = None,
) -> None:
    if isinstance(context.command, Commands):
        for text in unknown_variables(context.command):
            warn(text)
