"""The commands of `tracefit`: four read traces (run, inspect, ingest, receive), the others make models or use them.

Each collects its options, calls the function of the library with its own name, and returns the result to be shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

import tracefit
from tracefit.cli.arguments import InspectPaths, ModelFiles, Paths, TablesFolder, server_options
from tracefit.cli.program import command
from tracefit.console import Terminal
from tracefit.errors import UsageError
from tracefit.options import (
    BatchOption,
    CachedOption,
    ChangesOption,
    ConsumerVersionOption,
    ContextOption,
    DeploymentOption,
    EngineChoice,
    FeaturesOption,
    FigureOption,
    IngestOptions,
    LimitsOption,
    LoadOptions,
    ObjectivesOption,
    OptionFlag,
    OutputOption,
    PrefillOption,
    PrefillRequestsOption,
    PriceOption,
    PromptOption,
    QueueOption,
    RateOption,
    RowsOption,
    RunOption,
    ServerCountOption,
    ServerOptions,
    TablesOption,
    Tolerance,
    TrainOptions,
    WaitingOption,
    WorkersOption,
    from_flags,
)
from tracefit.receive.options import ReceiveOptions
from tracefit.synth.options import SynthOptions, surge_phases

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.commands.receive import Listening

# The functions of the library are imported when they are first used: help and completion must not wait for polars and scikit-learn.


@command("run to {out}", ServerOptions, IngestOptions, EngineChoice, TrainOptions)
def run(
    terminal: Terminal,
    paths: Paths,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for tables, models, evaluation and report."
        ),
    ],
    *,
    workers: WorkersOption = None,
    **options: Any,
) -> object:
    """Turn traces into tables, coefficients and a report.

    Example: `tracefit run runs/ --out out/`
    """
    return tracefit.run(
        paths,
        out,
        server=server_options(options),
        ingest_options=from_flags(IngestOptions, options),
        options=from_flags(TrainOptions, options),
        workers=workers,
        engine=from_flags(EngineChoice, options),
        progress=terminal,
    )


@command("inspect", ServerOptions)
def inspect(terminal: Terminal, paths: InspectPaths, **options: Any) -> object:
    """Describe traces, and what can be trained from them.

    Formats, services, sampling, events and the health of the journeys; nothing is fitted or written. Exit code 1 when
    nothing can be trained.

    Example: `tracefit inspect runs/`
    """
    return tracefit.inspect(paths, server=server_options(options), progress=terminal)


@command("ingest to {out}", ServerOptions, IngestOptions, EngineChoice)
def ingest(
    terminal: Terminal,
    paths: Paths,
    out: Annotated[str, typer.Option(metavar="PATH", help="The tables folder, or its s3:// or gs:// URL.")],
    *,
    workers: WorkersOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the files that would be read, and their formats; write nothing."
        ),
    ] = False,
    **options: Any,
) -> object:
    """Turn traces into Parquet tables.

    Files that the folder already has are not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    kept = from_flags(IngestOptions, options)
    # A plan depends on the files and on what the tables have, not on the server: its options are not even read.
    if dry_run:
        from tracefit.commands.ingest import plan_ingest
        from tracefit.reports.terminal_results import ingest_plan_text

        reads = plan_ingest(paths, out, options=kept)
        return reads, ingest_plan_text(reads)
    return tracefit.ingest(
        paths,
        out,
        server=server_options(options),
        options=kept,
        workers=workers,
        engine=from_flags(EngineChoice, options),
        progress=terminal,
    )


@command("receive to {out}", ServerOptions, ReceiveOptions)
def receive(
    terminal: Terminal,
    out: Annotated[
        Path, typer.Option(help="Folder of run folders; one is made for each service that sends.")
    ],
    model: Annotated[
        Optional[str], typer.Option(help="Model the servers run, as `vllm serve` names it.")
    ] = None,
    *,
    live: Annotated[bool, typer.Option("--live", help="Show on the terminal what comes in.")] = False,
    models: Annotated[
        Optional[Path],
        typer.Option(
            help="Coefficient files of the servers: their errors on the steps that come in are shown by --live and --metrics."
        ),
    ] = None,
    deployment: DeploymentOption = None,
    **options: Any,
) -> object:
    """Receive traces from running servers into run folders.

    OTLP over gRPC and HTTP, as vLLM sends it, without a collector. A request is acknowledged when it is on disk.

    Example: `tracefit receive --out traces/ --model meta-llama/Llama-3.1-8B-Instruct --gpu H100 --live`
    """
    from tracefit.commands.receive import receive as receive_command

    def listening(at: Listening) -> None:
        if not terminal.quiet:
            where = f"{at.host}:{at.grpc_port} (gRPC) and {at.host}:{at.http_port} (HTTP)"
            typer.echo(f"listening on {where}; writing to {at.out}", err=True)

    return receive_command(
        out,
        options=from_flags(ReceiveOptions, options),
        server=server_options(options, model=model),
        live=live,
        models=models,
        deployment=deployment,
        listening=listening,
        progress=terminal,
    )


@command("train on {tables}", TrainOptions, EngineChoice)
def train(
    terminal: Terminal,
    tables: TablesFolder,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for the models, the evaluation and the report."
        ),
    ],
    *,
    workers: WorkersOption = None,
    **options: Any,
) -> object:
    """Fit coefficient files on tables, with a report.

    Example: `tracefit train tables/ --out models/`
    """
    return tracefit.train(
        tables,
        out,
        options=from_flags(TrainOptions, options),
        workers=workers,
        engine=from_flags(EngineChoice, options),
        progress=terminal,
    )


@command("report of {folder}")
def report(
    terminal: Terminal,
    folder: Annotated[
        str, typer.Argument(help="A folder that run or train wrote: evaluation.json and the models.")
    ],
    tables: TablesOption = None,
    out: Annotated[
        Optional[str], typer.Option(metavar="PATH", help="Where to write; FOLDER if not given.")
    ] = None,
    slo: LimitsOption = None,
) -> object:
    """Write the report again, and print its verdicts.

    Example: `tracefit report out/`
    """
    from tracefit.commands.report import parse_slo

    return tracefit.report(folder, tables=tables, out=out, slo_ms=parse_slo(slo or []), progress=terminal)


@command("compare {first} with {second}", Tolerance)
def compare(
    terminal: Terminal,
    first: ModelFiles,
    second: Annotated[str, typer.Argument(help="Another one; or tables of new runs, for a drift check.")],
    deployment: DeploymentOption = None,
    run: RunOption = None,
    **options: Any,
) -> object:
    """Compare two coefficient files, or check one on new traces.

    A drift check exits with 0 if the file is still good, and with 1 if it has drifted or the new traces cannot tell.

    Example: `tracefit compare models/ new-tables/`
    """
    return tracefit.compare(
        first, second, deployment=deployment, run=run, tolerance=from_flags(Tolerance, options)
    )


@command("verify {file}")
def verify(
    terminal: Terminal,
    file: ModelFiles,
    tables: TablesOption = None,
    features: Annotated[
        Optional[Path], typer.Option(help="Where the feature-set file is now, if it moved.")
    ] = None,
) -> object:
    """Refit coefficient files and confirm each number.

    Numbers must agree to 1e-6; else the command names the inputs that differ and exits with 1.

    Example: `tracefit verify out/`
    """
    return tracefit.verify(file, tables, features=features, progress=terminal)


@command("replay {folder}")
def replay(
    terminal: Terminal,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `tracefit run` wrote.")],
    run: RunOption = None,
) -> object:
    """Replay the held-out part of runs with their models.

    Queue, batches and steps follow from them. Requests come when they came, and are as long as they were;
    what is in flight at the beginning is given. Times, throughput and the queue stand beside those measured.

    Example: `tracefit replay out/`
    """
    return tracefit.replay_runs(folder, run=run, progress=terminal)


@command("plan with {folders[0]}", LoadOptions)
def plan(
    terminal: Terminal,
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="OUT...",
            help="Folders that `tracefit run` wrote, or with coefficient files; each deployment is a kind of server.",
        ),
    ],
    rate: RateOption = None,
    servers: ServerCountOption = None,
    slo: ObjectivesOption = None,
    settings: ChangesOption = None,
    price: PriceOption = None,
    figure: FigureOption = None,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    **options: Any,
) -> object:
    """Plan servers for a load and its objectives.

    The fewest servers for --rate, or the largest rate of --servers, from replays of requests like those traced; latencies
    against the rate, with their intervals. It says where an answer rests on steps unlike those of the training.

    Example: `tracefit plan out/ --rate 40 --slo ttft_p99=500 --slo itl_p99=50`
    """
    from tracefit.commands.ingest import parse_assignments
    from tracefit.commands.report import parse_slo

    return tracefit.plan(
        folders,
        rate=rate,
        servers=servers,
        slo_ms=parse_slo(slo or []),
        settings=parse_assignments(settings or []),
        requests=from_flags(LoadOptions, options),
        price=price,
        figure=figure,
        deployment=deployment,
        run=run,
        progress=terminal,
    )


@command("requests of {tables}", is_quiet=False)
def requests(
    terminal: Terminal,
    tables: TablesFolder,
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="Print one line per request, in seconds and under vLLM's names, as CSV or JSON."
        ),
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout; times in seconds.")] = False,
) -> object:
    """Summarize requests: failures, latencies, throughput.

    Percentiles of TTFT, ITL, E2E and queue wait; by run, by phase and over time.

    Example: `tracefit requests out/`
    """
    from tracefit.commands.requests import seconds_csv, seconds_view
    from tracefit.reports.terminal_results import requests_csv

    if each:
        rows = seconds_view(tables)
        return rows, seconds_csv(rows)
    summary = tracefit.requests(tables)
    return (summary, requests_csv(summary)) if csv else summary


@command("predict with {models[0]}")
def predict(
    terminal: Terminal,
    models: Annotated[
        list[Path], typer.Argument(help="Coefficient files, or a folder that train or run wrote.")
    ],
    deployment: DeploymentOption = None,
    run: RunOption = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    prefill: PrefillOption = 0,
    prefill_reqs: PrefillRequestsOption = None,
    waiting: WaitingOption = 0,
    prompt: PromptOption = None,
    output: OutputOption = 1,
    queue: QueueOption = 0,
    cached: CachedOption = 0,
    feature: FeaturesOption = None,
    rows: RowsOption = None,
    of: Annotated[
        str, typer.Option(help="Kind of the rows: step, request, or a model's name with its features.")
    ] = "step",
    out: Annotated[
        Optional[Path], typer.Option(help="Write the predicted rows here, by suffix; else CSV on stdout.")
    ] = None,
) -> object:
    """Predict steps and requests from coefficient files alone.

    A described step: `--batch 32 --context 1500 --prefill 512`. A described request: `--prompt 800 --output 250 --queue 12`.

    Example: `tracefit predict models/ --deployment codellama-34b --batch 32`
    """
    from tracefit.coefficients.models import load
    from tracefit.commands.locate import choose_deployment
    from tracefit.commands.predict import parse_features
    from tracefit.reports.terminal_results import request_text, rows_text, step_text

    loaded = load(*models)
    chosen = choose_deployment(loaded, deployment, run)
    of_step = {"prefill": prefill, "prefill_reqs": prefill_reqs, "waiting": waiting}
    of_request = {"queue": queue, "cached": cached}
    given = {"prompt": prompt, "batch": batch, "context": context, "feature": feature}
    # typer has no way to say which options belong together.
    _check_description(
        given, of_step, {**of_request, "output": output if output != 1 else None}, has_rows=rows is not None
    )
    if rows is not None:
        found = tracefit.predict(loaded, rows, of=of, deployment=chosen, out=out, progress=terminal)
        return found, rows_text(found)
    features = parse_features(feature or [])
    if prompt is not None:
        request = loaded.predict_request(
            deployment=chosen,
            prompt_tokens=prompt,
            output_tokens=output,
            batch=batch,
            context=context,
            features=features,
            queue=queue,
            cached=cached,
        )
        return request, request_text(request)
    step = loaded.predict_step(
        deployment=chosen,
        batch=batch or 0,
        context=context or 0,
        features=features,
        prefill=prefill,
        prefill_reqs=prefill_reqs,
        waiting=waiting,
    )
    return step, step_text(step)


def _check_description(
    given: Mapping[str, object],
    of_step: Mapping[str, object],
    of_request: Mapping[str, object],
    *,
    has_rows: bool,
) -> None:
    """Refuse options that the prediction would leave unread: those of a request without its prompt, those of a step beside it."""
    described, steps, requests = (
        [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
        for options in ({**given, **of_request, **of_step}, of_step, of_request)
    )
    if has_rows:
        if described:
            raise UsageError(
                f"{described[0]} describes one prediction, --rows has many", hint="make it a column"
            )
        return
    if given["prompt"] is None and requests:
        raise UsageError(f"{requests[0]} describes a request", hint="give its --prompt too")
    if given["prompt"] is not None and steps:
        raise UsageError(f"{steps[0]} describes a step, --prompt a request", hint="leave one of them out")
    if not any((given["prompt"], given["batch"], of_step["prefill"], given["feature"])):
        raise UsageError(
            "nothing to predict",
            hint="describe a step (--batch, --prefill) or a request (--prompt, --output)",
        )


@command("export of {models} to {to}")
def export(
    terminal: Terminal,
    models: ModelFiles,
    to: Annotated[
        str,
        OptionFlag(
            "The consumer, such as blis, dynamo-mocker or csv; an unknown name lists all of them.",
            completion="consumers",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="PATH", help="Folder for the consumer's files.")],
    tables: TablesOption = None,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    consumer_version: ConsumerVersionOption = None,
) -> object:
    """Write coefficients in the form a consumer loads.

    They are refitted in the consumer's form, with its held-out error. A model that cannot be converted is refused with the reason (exit code 1).

    Example: `tracefit export out/ --to blis --deployment codellama-34b --out blis/`
    """
    return tracefit.export(
        models, to, out, tables=tables, deployment=deployment, run=run, consumer_version=consumer_version
    )


# A run must not hold a span twice: `both` writes two run folders.
_FORMATS: dict[str, tuple[Literal["json", "protobuf"], ...]] = {
    "json": ("json",),
    "protobuf": ("protobuf",),
    "both": ("json", "protobuf"),
}


@command("features", is_quiet=False)
def features(
    terminal: Terminal,
    names: Annotated[
        Optional[list[str]],
        typer.Argument(help="Built-in sets or files; every built-in set if none is named."),
    ] = None,
) -> object:
    """Show the declared feature sets.

    Name, unit, formula and reason of every feature.

    Example: `tracefit features batch`
    """
    from tracefit.features.sets import BUILT_IN, feature_sets

    # As `train --features` reads them: what is shown here is what would be fitted.
    return [s for name in names or BUILT_IN for s in feature_sets(name)]


@command("synth to {out}", SynthOptions)
def synth(
    terminal: Terminal,
    out: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")],
    *,
    surge: Annotated[
        Optional[float],
        typer.Option(
            help="Factor on the arrivals in the last 30 % of the time, steady before; light, burst and heavy load if not given."
        ),
    ] = None,
    format_: Annotated[
        Literal["json", "protobuf", "both"],
        typer.Option("--format", help="JSON lines, framed protobuf, or a run folder of each."),
    ] = "json",
    compress: Annotated[
        Literal["none", "gz", "zst"], typer.Option(help="Compression of the trace files.")
    ] = "none",
    **options: Any,
) -> object:
    """Generate traces with known coefficients.

    They have the form of real traces, with the truth beside them.

    Example: `tracefit synth --out runs/ --requests 600 --law linear`
    """
    from tracefit.commands.generate import generate

    # Without --surge the load is light, bursts, and is heavy: a queue builds up and empties.
    load = {} if surge is None else {"phases": surge_phases(surge)}
    return generate(
        out,
        from_flags(SynthOptions, options, **load),
        formats=_FORMATS[format_],
        compress=None if compress == "none" else compress,
        progress=terminal,
    )
