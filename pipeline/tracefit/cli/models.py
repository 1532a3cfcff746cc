"""Commands that fit, report, compare and verify models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from tracefit.cli.arguments import (
    Across,
    AnySign,
    BetaTarget,
    Fast,
    Features,
    IncludeOverloaded,
    Json,
    ModelFiles,
    Positive,
    Quiet,
    RunName,
    SampleCsv,
    ScopeName,
    TablesFolder,
    Thresholds,
    train_options,
)
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors, show


@app.command()
def train(
    context: typer.Context,
    tables: TablesFolder,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for the models, the evaluation and the report."
        ),
    ],
    beta_target: BetaTarget = "auto",
    features: Features = "auto",
    sample_csv: SampleCsv = False,
    positive: Positive = False,
    any_sign: AnySign = False,
    fast: Fast = False,
    include_overloaded: IncludeOverloaded = False,
    across: Across = False,
    thresholds: Thresholds = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit coefficient files on tables, with a report.

    Example: `tracefit train tables/ --out models/`
    """
    terminal = Terminal(quiet=quiet, task=f"train on {tables}")
    with one_line_errors(terminal):
        from tracefit.commands.train import train as train_command
        from tracefit.reports.terminal_results import train_text

        options = train_options(context)
        result = train_command(tables, out, options=options, progress=terminal)
        terminal.close()
        show(result, train_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def report(
    folder: Annotated[
        str, typer.Argument(help="A folder that run or train wrote: evaluation.json and the models.")
    ],
    tables: Annotated[
        Optional[str],
        typer.Option(
            metavar="PATH", help="The tables folder; FOLDER/tables if not given. Figures come from it."
        ),
    ] = None,
    out: Annotated[
        Optional[str], typer.Option(metavar="PATH", help="Where to write; FOLDER if not given.")
    ] = None,
    slo: Annotated[
        Optional[list[str]],
        typer.Option(
            "--slo",
            metavar="LATENCY=MS",
            help="The longest that ttft, itl or e2e should take: a line in the figures. May be given several times; "
            "MLPerf's limits (ttft=2000, itl=200) if not given.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write report.html and report.md again, and print what they say.

    Example: `tracefit report out/`
    """
    terminal = Terminal(quiet=quiet, task=f"report of {folder}")
    with one_line_errors(terminal):
        from tracefit.commands.report import parse_slo
        from tracefit.commands.report import report as report_command

        objectives = parse_slo(slo or [])
        result, made = report_command(folder, tables=tables, out=out, slo_ms=objectives, progress=terminal)
        terminal.close()
        # A person gets what the report says; a program gets the files it was written to.
        if json or quiet:
            show(result, "", as_json=json, quiet=quiet)
        else:
            from tracefit.reports.terminal import PipeConsole, print_report

            print_report(made, result.files, PipeConsole())


@app.command()
def compare(
    first: ModelFiles,
    second: Annotated[str, typer.Argument(help="Another one; or tables of new runs, for a drift check.")],
    scope: ScopeName = None,
    run: RunName = None,
    tolerance: Annotated[
        float, typer.Option(min=1, help="Drift: factor on the published error that is still good.")
    ] = 1.5,
    slack: Annotated[
        float, typer.Option(min=0, help="Drift: percentage points above it that are still good.")
    ] = 2.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two coefficient files, or check one on new traces.

    A drift check exits with 0 if the file is still good, and with 1 if it has drifted or the new traces are too few to decide.

    Example: `tracefit compare models/ new-tables/`
    """
    terminal = Terminal(quiet=quiet, task=f"compare {first} with {second}")
    with one_line_errors(terminal):
        from tracefit.commands.compare import Tolerance
        from tracefit.commands.compare import compare as compare_command
        from tracefit.reports.terminal_results import compare_text

        result = compare_command(first, second, scope=scope, run=run, tolerance=Tolerance(tolerance, slack))
        show(result, compare_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def verify(
    file: ModelFiles,
    tables: Annotated[
        Optional[str],
        typer.Option(metavar="PATH", help="Tables it was trained on; found beside the models if not given."),
    ] = None,
    features: Annotated[
        Optional[Path], typer.Option(help="Where the feature-set file is now, if it moved.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Refit coefficient files and confirm each number.

    Numbers must agree to 1e-6; else the command names the inputs that differ and exits with 1.

    Example: `tracefit verify out/`
    """
    terminal = Terminal(quiet=quiet, task=f"verify {file}")
    with one_line_errors(terminal):
        from tracefit.commands.verify import verify as verify_command
        from tracefit.reports.terminal_results import verify_text

        result = verify_command(file, tables, features=features, progress=terminal)
        terminal.close()
        show(result, verify_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)
