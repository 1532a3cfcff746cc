"""Commands that read traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracefit.cli.arguments import (
    Across,
    AllSpans,
    AnySign,
    BetaTarget,
    Fast,
    Features,
    GpuName,
    IncludeOverloaded,
    InspectPaths,
    Json,
    KeepAttributes,
    MaxDocument,
    MaxRejects,
    ModelConfig,
    Paths,
    Positive,
    Quiet,
    RunConfig,
    SampleCsv,
    Settings,
    ShowValues,
    TensorParallel,
    Thresholds,
    Workers,
    ingest_options,
    server_options,
    train_options,
)
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors, show


@app.command()
def run(
    context: typer.Context,
    paths: Paths,
    out: Annotated[Path, typer.Option(help="Folder for tables, models, evaluation and report.")],
    run_config: RunConfig = None,
    model_config: ModelConfig = None,
    gpu: GpuName = None,
    tp: TensorParallel = None,
    settings: Settings = None,
    all_spans: AllSpans = False,
    keep_attributes: KeepAttributes = None,
    show_values: ShowValues = False,
    max_document: MaxDocument = 256,
    max_rejects: MaxRejects = 100_000,
    workers: Workers = None,
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
    """Turn traces into tables, coefficients and a report.

    Example: `tracefit run runs/ --out out/`
    """
    terminal = Terminal(quiet=quiet, task=f"run to {out}")
    with one_line_errors(terminal):
        from tracefit.commands.run import run as run_command
        from tracefit.reports.terminal_results import run_text

        server = server_options(run_config, model_config, gpu, tp, settings)
        kept = ingest_options(context)
        options = train_options(context)
        result = run_command(
            paths,
            out,
            server=server,
            ingest_options=kept,
            options=options,
            workers=workers,
            progress=terminal,
        )
        terminal.close()
        show(result, run_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def inspect(
    paths: InspectPaths,
    run_config: RunConfig = None,
    model_config: ModelConfig = None,
    gpu: GpuName = None,
    tp: TensorParallel = None,
    settings: Settings = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Describe traces, and what can be trained from them.

    Formats, services, sampling, events and the health of the journeys; nothing is fitted or written. Exit code 1 when
    nothing can be trained.

    Example: `tracefit inspect runs/`
    """
    terminal = Terminal(quiet=quiet, task="inspect")
    with one_line_errors(terminal):
        from tracefit.commands.inspect import inspect as inspect_command
        from tracefit.reports.terminal_results import inspection_text

        server = server_options(run_config, model_config, gpu, tp, settings)
        result = inspect_command(paths, server=server, progress=terminal)
        terminal.close()
        show(result, inspection_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def ingest(
    context: typer.Context,
    paths: Paths,
    out: Annotated[Path, typer.Option(help="The tables folder.")],
    run_config: RunConfig = None,
    model_config: ModelConfig = None,
    gpu: GpuName = None,
    tp: TensorParallel = None,
    settings: Settings = None,
    all_spans: AllSpans = False,
    keep_attributes: KeepAttributes = None,
    show_values: ShowValues = False,
    max_document: MaxDocument = 256,
    max_rejects: MaxRejects = 100_000,
    workers: Workers = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the files that would be read, and their formats; write nothing."
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn traces into Parquet tables.

    Files that the folder already has are not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    terminal = Terminal(quiet=quiet, task=f"ingest to {out}")
    with one_line_errors(terminal):
        from tracefit.commands.ingest import ingest as ingest_command
        from tracefit.commands.plan import plan_ingest
        from tracefit.reports.terminal_results import ingest_text, plan_text

        kept = ingest_options(context)
        if dry_run:
            plan = plan_ingest(paths, out, options=kept)
            show(plan, plan_text(plan), as_json=json, quiet=quiet)
            return
        server = server_options(run_config, model_config, gpu, tp, settings)
        result = ingest_command(paths, out, server=server, options=kept, workers=workers, progress=terminal)
        terminal.close()
        show(result, ingest_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)
