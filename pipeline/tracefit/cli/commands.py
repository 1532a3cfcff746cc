"""The commands of `tracefit`: four read traces (run, inspect, ingest, receive), the others make models or use them.

Each collects its options, calls the function of the library with its own name, and returns the result and its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import typer

import tracefit
from tracefit.cli.arguments import server_options
from tracefit.cli.program import command
from tracefit.console import Terminal
from tracefit.errors import UsageError
from tracefit.options import (
    BatchOption,
    CachedOption,
    CalibrateOption,
    ChangesOption,
    ConsumerOption,
    ConsumerVersionOption,
    ContextOption,
    CsvOption,
    DayOptions,
    DeploymentOption,
    DryRunOption,
    EachOption,
    EngineChoice,
    ExportOutOption,
    FeatureSetsArgument,
    FeaturesFileOption,
    FeaturesOption,
    FigureOption,
    FirstArgument,
    ForceOption,
    IngestOptions,
    IngestOutOption,
    InspectedArgument,
    LawEngineOption,
    LimitsOption,
    LoadOptions,
    ModelsArgument,
    ObjectivesOption,
    OutputOption,
    PathsArgument,
    PlannedArgument,
    PredictingArgument,
    PrefillOption,
    PrefillRequestsOption,
    PriceOption,
    PromptOption,
    QueueOption,
    RateOption,
    ReplayedArgument,
    ReplayedRunOption,
    ReportedArgument,
    ReportOutOption,
    RowKindOption,
    RowsOption,
    RowsOutOption,
    RunOption,
    RunOutOption,
    SecondArgument,
    ServerCountOption,
    ServerOptions,
    SourcesArgument,
    TablesArgument,
    TablesOption,
    Tolerance,
    TrainOptions,
    TrainOutOption,
    TransferOutOption,
    TriedForceOption,
    TriedModelOption,
    TryOption,
    VerifiedArgument,
    WaitingOption,
    WorkersOption,
    from_flags,
    named,
)
from tracefit.receive.options import (
    LiveOption,
    ReceiveOptions,
    ReceiveOutOption,
    ServedModelOption,
    WatchedModelsOption,
)
from tracefit.synth.options import (
    CompressOption,
    FormatsOption,
    SurgeOption,
    SynthOptions,
    SynthOutOption,
    surge_phases,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.commands.receive import Listening

# The functions of the library are imported when they are first used: help and completion must not wait for polars.


@command("run to {out}", ServerOptions, IngestOptions, EngineChoice, TrainOptions)
def run(
    terminal: Terminal,
    paths: PathsArgument,
    out: RunOutOption,
    *,
    workers: WorkersOption = None,
    **options: Any,
) -> tuple[object, str]:
    """Turn traces into tables, coefficients and a report.

    Example: `tracefit run runs/ --out out/`
    """
    from tracefit.reports.terminal_results import run_text

    result = tracefit.run(
        paths,
        out,
        server=server_options(options),
        ingest_options=from_flags(IngestOptions, options),
        options=from_flags(TrainOptions, options),
        workers=workers,
        engine=from_flags(EngineChoice, options),
        progress=terminal,
    )
    return result, run_text(result)


@command("inspect", ServerOptions)
def inspect(terminal: Terminal, paths: InspectedArgument, **options: Any) -> tuple[object, str]:
    """Describe traces and the models that they can train.

    Shows formats, services, sampling, events and how complete the journeys are; fits and writes nothing. The exit code
    is 1 if no model can be trained.

    Example: `tracefit inspect runs/`
    """
    from tracefit.reports.terminal_results import inspect_text

    result = tracefit.inspect(paths, server=server_options(options), progress=terminal)
    return result, inspect_text(result)


@command("ingest to {out}", ServerOptions, IngestOptions, EngineChoice)
def ingest(
    terminal: Terminal,
    paths: PathsArgument,
    out: IngestOutOption,
    *,
    workers: WorkersOption = None,
    dry_run: DryRunOption = False,
    **options: Any,
) -> tuple[object, str]:
    """Turn traces into Parquet tables.

    Files that the folder already has are not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    from tracefit.reports.terminal_results import ingest_plan_text, ingest_text

    kept = from_flags(IngestOptions, options)
    # A plan depends on the files and the tables, not on the server: its options are not read.
    if dry_run:
        from tracefit.commands.ingest import plan_ingest

        reads = plan_ingest(paths, out, options=kept)
        return reads, ingest_plan_text(reads)
    result = tracefit.ingest(
        paths,
        out,
        server=server_options(options),
        options=kept,
        workers=workers,
        engine=from_flags(EngineChoice, options),
        progress=terminal,
    )
    return result, ingest_text(result)


@command("receive to {out}", ServerOptions, ReceiveOptions)
def receive(
    terminal: Terminal,
    out: ReceiveOutOption,
    model: ServedModelOption = None,
    *,
    live: LiveOption = False,
    models: WatchedModelsOption = None,
    deployment: DeploymentOption = None,
    **options: Any,
) -> tuple[object, str]:
    """Receive traces from running servers into run folders.

    Takes OTLP over gRPC and HTTP, as vLLM sends it, without a collector. Acknowledges a request when it is on disk.

    Example: `tracefit receive --out traces/ --model meta-llama/Llama-3.1-8B-Instruct --gpu H100 --live`
    """
    from tracefit.commands.receive import receive as receive_command
    from tracefit.reports.terminal_results import receive_text

    def listening(at: Listening) -> None:
        if not terminal.quiet:
            where = f"{at.host}:{at.grpc_port} (gRPC) and {at.host}:{at.http_port} (HTTP)"
            typer.echo(f"listening on {where}; writing to {at.out}", err=True)

    result = receive_command(
        out,
        options=from_flags(ReceiveOptions, options),
        server=server_options(options, model=model),
        live=live,
        models=models,
        deployment=deployment,
        listening=listening,
        progress=terminal,
    )
    return result, receive_text(result)


@command("train on {tables}", TrainOptions, EngineChoice)
def train(
    terminal: Terminal,
    tables: TablesArgument,
    out: TrainOutOption,
    *,
    workers: WorkersOption = None,
    **options: Any,
) -> tuple[object, str]:
    """Fit coefficients on tables, and write a report.

    Example: `tracefit train tables/ --out models/`
    """
    from tracefit.reports.terminal_results import train_text

    result = tracefit.train(
        tables,
        out,
        options=from_flags(TrainOptions, options),
        workers=workers,
        engine=from_flags(EngineChoice, options),
        progress=terminal,
    )
    return result, train_text(result)


@command("report of {folder}")
def report(
    terminal: Terminal,
    folder: ReportedArgument,
    tables: TablesOption = None,
    out: ReportOutOption = None,
    slo: LimitsOption = None,
) -> tuple[object, str]:
    """Write the report again, and print its verdicts.

    Example: `tracefit report out/`
    """
    from tracefit.commands.report import parse_slo
    from tracefit.reports.terminal_results import report_text

    result = tracefit.report(folder, tables=tables, out=out, slo_ms=parse_slo(slo or []), progress=terminal)
    return result, report_text(result)


@command("compare {first} with {second}", Tolerance)
def compare(
    terminal: Terminal,
    first: FirstArgument,
    second: SecondArgument,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    **options: Any,
) -> tuple[object, str]:
    """Compare two coefficient files, or check one on new measurements.

    Points of a benchmark stand beside the predictions of their loads; some that are not compared exit with 3. A drift
    check exits with 0 if the file is still good, and with 1 if it has drifted or the new traces cannot tell.

    Example: `tracefit compare models/ new-tables/`
    """
    from tracefit.reports.terminal_results import compare_text

    result = tracefit.compare(first, second, deployment=deployment, run=run, tolerance=from_flags(Tolerance, options))
    return result, compare_text(result)


@command("verify {file}")
def verify(
    terminal: Terminal,
    file: VerifiedArgument,
    tables: TablesOption = None,
    features: FeaturesFileOption = None,
) -> tuple[object, str]:
    """Refit coefficient files and confirm each number.

    Numbers must agree to 1e-6; if they do not, the command names the inputs that differ and exits with 1.

    Example: `tracefit verify out/`
    """
    from tracefit.reports.terminal_results import verify_text

    result = tracefit.verify(file, tables, features=features, progress=terminal)
    return result, verify_text(result)


@command("replay {folder}")
def replay(
    terminal: Terminal,
    folder: ReplayedArgument,
    run: ReplayedRunOption = None,
) -> tuple[object, str]:
    """Replay the held-out part of runs with their models.

    The models give the queue, the batches and the steps. Requests have their measured arrivals and lengths; those in
    flight at the beginning have their measured past. Shows times, throughput and the queue next to the measured ones.

    Example: `tracefit replay out/`
    """
    from tracefit.reports.terminal_results import replay_text

    result = tracefit.replay_runs(folder, run=run, progress=terminal)
    return result, replay_text(result)


@command("plan with {folders}", LoadOptions, DayOptions)
def plan(
    terminal: Terminal,
    folders: PlannedArgument = None,
    rate: RateOption = None,
    servers: ServerCountOption = None,
    slo: ObjectivesOption = None,
    settings: ChangesOption = None,
    price: PriceOption = None,
    tries: TryOption = None,
    model_config: TriedModelOption = None,
    force: TriedForceOption = False,
    figure: FigureOption = None,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    **options: Any,
) -> tuple[object, str]:
    """Plan servers for a load and its objectives.

    Finds the fewest servers for --rate, or the largest rate of --servers, by replaying requests like the traced ones.
    Shows latencies against the rate, with intervals, and says if an answer rests on steps unlike those in training.
    Several kinds of server for one rate are in one table, the cheapest first; --try computes servers that were never
    traced. A file of requests with their times (--arrivals) gives servers hour by hour, the fewest for all of it, and
    those of a scaler.

    Example: `tracefit plan out/ --rate 40 --slo ttft_p99=500 --slo itl_p99=50`
    """
    from tracefit.commands.candidates import parse_tries
    from tracefit.commands.ingest import parse_assignments
    from tracefit.commands.prices import parse_prices
    from tracefit.commands.report import parse_slo
    from tracefit.reports.terminal_results import plan_text

    result = tracefit.plan(
        folders,
        rate=rate,
        servers=servers,
        slo_ms=parse_slo(slo or []),
        settings=parse_assignments(settings or []),
        requests=from_flags(LoadOptions, options),
        day=from_flags(DayOptions, options),
        price=parse_prices(list(cast("list[str]", price or ()))),
        tries=parse_tries(cast("list[str]", tries or ())),
        model_config=model_config,
        force=force,
        figure=figure,
        deployment=deployment,
        run=run,
        progress=terminal,
    )
    return result, plan_text(result)


@command("transfer to {out}", ServerOptions)
def transfer(
    terminal: Terminal,
    folders: SourcesArgument = None,
    calibrate: CalibrateOption = None,
    *,
    out: TransferOutOption,
    engine: LawEngineOption = None,
    force: ForceOption = False,
    **options: Any,
) -> tuple[object, str]:
    """Predict a server that was never traced, from others.

    Fits a law in time at rated speed to the steps of the sources, measures it on servers left out of them, and writes
    models, evaluation and report of the new server. Without sources the law is the package's own, of public points, for
    the time between tokens. A few minutes of the new server's traces, or ten points of a benchmark of it, draw the law
    to it.

    Example: `tracefit transfer out/ --model-config config.json --gpu B300 --tp 2 --out new/`
    """
    from tracefit.reports.terminal_results import transfer_text

    result = tracefit.transfer(
        folders,
        out,
        server=server_options(options),
        engine=engine,
        calibrate=calibrate,
        force=force,
        progress=terminal,
    )
    return result, transfer_text(result)


@command("requests of {tables}", is_quiet=False)
def requests(
    terminal: Terminal,
    tables: TablesArgument,
    each: EachOption = False,
    csv: CsvOption = False,
) -> tuple[object, str]:
    """Summarize requests: failures, latencies, throughput.

    Shows percentiles of TTFT, ITL, E2E and queue wait by run, by phase and over time.

    Example: `tracefit requests out/`
    """
    from tracefit.commands.requests import csv_text, seconds_view
    from tracefit.reports.terminal_results import requests_csv, requests_text

    if each:
        rows = seconds_view(tables)
        return rows, csv_text(rows)
    summary = tracefit.requests(tables)
    return summary, requests_csv(summary) if csv else requests_text(summary)


@command("predict with {models[0]}")
def predict(
    terminal: Terminal,
    models: PredictingArgument,
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
    of: RowKindOption = "step",
    out: RowsOutOption = None,
) -> tuple[object, str]:
    """Predict steps and requests from coefficient files.

    Describe a step, such as `--batch 32 --context 1500 --prefill 512`, or a request, such as `--prompt 800 --output 250
    --queue 12`.

    Example: `tracefit predict models/ --deployment codellama-34b --batch 32`
    """
    from tracefit.coefficients.models import load
    from tracefit.commands.locate import choose_deployment
    from tracefit.commands.predict import parse_features
    from tracefit.reports.terminal_results import request_text, rows_text, step_text

    loaded = load(*models)
    chosen = choose_deployment(loaded, deployment, run)
    of_step = {PrefillOption: prefill, PrefillRequestsOption: prefill_reqs, WaitingOption: waiting}
    of_request = {
        QueueOption: queue,
        CachedOption: cached,
        OutputOption: output if output != 1 else None,
    }
    described = {PromptOption: prompt, BatchOption: batch, ContextOption: context, FeaturesOption: feature}
    # typer cannot say which options go with which.
    _check_description(described, of_step, of_request, has_rows=rows is not None)
    if rows is not None:
        predicted = tracefit.predict(loaded, rows, of=of, deployment=chosen, out=out, progress=terminal)
        return predicted, rows_text(predicted)
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
    described: Mapping[Any, object],
    of_step: Mapping[Any, object],
    of_request: Mapping[Any, object],
    *,
    has_rows: bool,
) -> None:
    """Refuse options that the prediction would ignore: those of a request without its prompt, those of a step with
    one.
    """
    everything, steps, requests = (
        [named(declared) for declared, value in options.items() if value]
        for options in ({**described, **of_request, **of_step}, of_step, of_request)
    )
    prompt, batch, prefill = named(PromptOption), named(BatchOption), named(PrefillOption)
    if has_rows:
        if everything:
            raise UsageError(
                f"{everything[0]} describes one prediction, {named(RowsOption)} has many",
                hint="make it a column",
            )
        return
    if described[PromptOption] is None and requests:
        raise UsageError(f"{requests[0]} describes a request", hint=f"give its {prompt} too")
    if described[PromptOption] is not None and steps:
        raise UsageError(f"{steps[0]} describes a step, {prompt} a request", hint="leave one of them out")
    if not any((described[PromptOption], described[BatchOption], of_step[PrefillOption], described[FeaturesOption])):
        raise UsageError(
            "nothing to predict",
            hint=f"describe a step ({batch}, {prefill}) or a request ({prompt}, {named(OutputOption)})",
        )


@command("export of {models} to {to}")
def export(
    terminal: Terminal,
    models: ModelsArgument,
    to: ConsumerOption,
    out: ExportOutOption,
    tables: TablesOption = None,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    consumer_version: ConsumerVersionOption = None,
) -> tuple[object, str]:
    """Write coefficients in the form that a consumer loads.

    Refits them in the consumer's form and prints its held-out error. Refuses a model that cannot be converted, with the
    reason (exit code 1).

    Example: `tracefit export out/ --to blis --deployment codellama-34b --out blis/`
    """
    from tracefit.reports.terminal_results import export_text

    result = tracefit.export(
        models, to, out, tables=tables, deployment=deployment, run=run, consumer_version=consumer_version
    )
    return result, export_text(result)


@command("features", is_quiet=False)
def features(
    terminal: Terminal,
    names: FeatureSetsArgument = None,
) -> tuple[object, str]:
    """Show the declared feature sets.

    Shows the name, unit, formula and reason of every feature.

    Example: `tracefit features batch`
    """
    from tracefit.features.sets import BUILT_IN, feature_sets
    from tracefit.reports.terminal_results import features_text

    # Read as by `train --features`: the sets shown here are those that would be fitted.
    sets = [s for name in names or BUILT_IN for s in feature_sets(name)]
    return sets, features_text(sets)


@command("synth to {out}", SynthOptions)
def synth(
    terminal: Terminal,
    out: SynthOutOption,
    *,
    surge: SurgeOption = None,
    formats: FormatsOption = "json",
    compress: CompressOption = "none",
    **options: Any,
) -> tuple[object, str]:
    """Generate traces with known coefficients.

    The traces have the form of real ones; truth.json next to them has the true coefficients.

    Example: `tracefit synth --out runs/ --requests 600 --law linear`
    """
    from tracefit.commands.generate import generate
    from tracefit.reports.terminal_results import synth_text

    # Without --surge the load is light, bursts, and is heavy: a queue builds up and empties.
    load = {} if surge is None else {"phases": surge_phases(surge)}
    result = generate(
        out,
        from_flags(SynthOptions, options, **load),
        formats=formats,
        compress=compress,
        progress=terminal,
    )
    return result, synth_text(result)
