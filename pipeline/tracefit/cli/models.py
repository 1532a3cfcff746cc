"""Commands that fit models and judge them."""

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
    Positive,
    Quiet,
    SampleCsv,
    ScopeName,
    Target,
    Thresholds,
    train_options,
)
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors, show


@app.command()
def train(
    context: typer.Context,
    tables: Annotated[Path, typer.Argument(help="A tables folder that ingest wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the models, the evaluation and the report.")],
    beta_target: Target = BetaTarget.auto,
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
    """Make coefficient files and a report of tables.

    Example: `tracefit train tables/ --out models/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.train import train as train_verb
        from tracefit.reports.terminal_results import train_text

        options = train_options(context)
        result = train_verb(tables, out, options=options, progress=told)
        told.close()
        show(result, train_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What run or train wrote: evaluation.json and the models.")],
    tables: Annotated[
        Optional[Path],
        typer.Option(help="The tables folder; FOLDER/tables if not given. Figures come from it."),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Where to write; FOLDER if not given.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write report.html and report.md anew, and print the report.

    Example: `tracefit report out/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.report import report as report_verb

        result, made = report_verb(folder, tables=tables, out=out, progress=told)
        told.close()
        if json or quiet:
            show(result, "", as_json=json, quiet=quiet)
        else:
            from rich.console import Console

            from tracefit.reports.terminal import print_report

            print_report(made, Console())


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A coefficient file, or a folder of them.")],
    second: Annotated[
        Path, typer.Argument(help="Another one; or a tables folder of new runs, for a drift check.")
    ],
    scope: ScopeName = None,
    tolerance: Annotated[
        float, typer.Option(min=1, help="Drift: times the published error that is still good.")
    ] = 1.5,
    slack: Annotated[
        float, typer.Option(min=0, help="Drift: percentage points above it that are still good.")
    ] = 2.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two coefficient files, or check one on new traces.

    A drift check exits with 0 if the file is still good, with 1 if it has drifted or the new traces cannot tell.

    Example: `tracefit compare models/ new-tables/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.compare import Tolerance
        from tracefit.commands.compare import compare as compare_verb
        from tracefit.reports.terminal_results import compare_text

        result = compare_verb(first, second, scope=scope, tolerance=Tolerance(tolerance, slack))
        show(result, compare_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="alpha.json or beta.json.")],
    tables: Annotated[Path, typer.Option(help="Tables with the runs it was trained on.")],
    features: Annotated[
        Optional[Path], typer.Option(help="Where the feature-set file is now, if it moved.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Refit a coefficient file and confirm each number.

    To 1e-6; or it says which input differs. Exits with 1 where the file is not confirmed.

    Example: `tracefit verify out/models/beta.json --tables out/tables`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.verify import verify as verify_verb
        from tracefit.reports.terminal_results import verify_text

        result = verify_verb(file, tables, features=features, progress=told)
        told.close()
        show(result, verify_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)
