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
    Target,
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
    """Make tables, coefficients and a report of traces: the main job.

    Example: `tracefit run runs/ --out out/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.run import run as run_verb
        from tracefit.reports.terminal_results import run_text

        server = server_options(run_config, model_config, gpu, tp, settings)
        kept = ingest_options(context)
        options = train_options(context)
        result = run_verb(
            paths,
            out,
            server=server,
            ingest_options=kept,
            options=options,
            workers=workers,
            progress=told,
        )
        told.close()
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
    """Say what is in traces, and what can be trained from them.

    Shape, services, sampling, events, and how healthy the journeys are; nothing is fitted or written. Exit code 1 when
    nothing can be trained from them.

    Example: `tracefit inspect runs/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.inspect import inspect as inspect_verb
        from tracefit.reports.terminal_results import inspection_text

        server = server_options(run_config, model_config, gpu, tp, settings)
        result = inspect_verb(paths, server=server, progress=told)
        told.close()
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
        bool, typer.Option("--dry-run", help="Say what would be read, and as what; write nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make Parquet tables of traces.

    What the folder has already is not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.commands.ingest import ingest as ingest_verb
        from tracefit.commands.plan import plan_ingest
        from tracefit.reports.terminal_results import ingest_text, plan_text

        kept = ingest_options(context)
        if dry_run:
            plan = plan_ingest(paths, out, options=kept)
            show(plan, plan_text(plan), as_json=json, quiet=quiet)
            return
        server = server_options(run_config, model_config, gpu, tp, settings)
        result = ingest_verb(paths, out, server=server, options=kept, workers=workers, progress=told)
        told.close()
        show(result, ingest_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)
