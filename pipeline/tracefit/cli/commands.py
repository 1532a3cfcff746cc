"""The commands of `tracefit`: four read traces (run, inspect, ingest, receive), the others make models or use them.

Each collects its options, calls the function of the library with its own name, and shows the result as text or JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from tracefit.cli.arguments import (
    ENGINE,
    INGEST,
    SERVER,
    TRAIN,
    AllSpans,
    InspectPaths,
    Json,
    KeepAttributes,
    ModelFiles,
    Paths,
    Quiet,
    RunName,
    ScopeName,
    TablesFolder,
    engine_options,
    ingest_options,
    keys_of,
    server_options,
    takes,
    train_options,
)
from tracefit.cli.program import app
from tracefit.console import command
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from tracefit.commands.receive import Listening


# The values of the options that `takes` adds reach the library by name, from `context.params`.
@app.command()
@takes(SERVER, INGEST, ENGINE, TRAIN)
def run(
    context: typer.Context,
    paths: Paths,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for tables, models, evaluation and report."
        ),
    ],
    *,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Turn traces into tables, coefficients and a report.

    Example: `tracefit run runs/ --out out/`
    """
    with command(f"run to {out}", quiet=quiet) as terminal:
        from tracefit.commands.train import run as run_command
        from tracefit.reports.terminal_results import run_text

        server = server_options(context)
        kept = ingest_options(context)
        options = train_options(context)
        result = run_command(
            paths,
            out,
            server=server,
            ingest_options=kept,
            options=options,
            workers=context.params["workers"],
            engine=engine_options(context),
            progress=terminal,
        )
        terminal.show(result, run_text(result), as_json=json)


@app.command()
@takes(SERVER)
def inspect(
    context: typer.Context,
    paths: InspectPaths,
    *,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Describe traces, and what can be trained from them.

    Formats, services, sampling, events and the health of the journeys; nothing is fitted or written. Exit code 1 when
    nothing can be trained.

    Example: `tracefit inspect runs/`
    """
    with command("inspect", quiet=quiet) as terminal:
        from tracefit.commands.inspect import inspect as inspect_command
        from tracefit.reports.terminal_results import inspection_text

        server = server_options(context)
        result = inspect_command(paths, server=server, progress=terminal)
        terminal.show(result, inspection_text(result), as_json=json)


@app.command()
@takes(SERVER, INGEST, ENGINE)
def ingest(
    context: typer.Context,
    paths: Paths,
    out: Annotated[str, typer.Option(metavar="PATH", help="The tables folder, or its s3:// or gs:// URL.")],
    *,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the files that would be read, and their formats; write nothing."
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Turn traces into Parquet tables.

    Files that the folder already has are not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    with command(f"ingest to {out}", quiet=quiet) as terminal:
        from tracefit.commands.ingest import ingest as ingest_command
        from tracefit.commands.ingest import plan_ingest
        from tracefit.reports.terminal_results import ingest_text, plan_text

        kept = ingest_options(context)
        # A plan depends on the files and on what the tables have, not on the server: its options are not even read.
        if dry_run:
            plan = plan_ingest(paths, out, options=kept)
            terminal.show(plan, plan_text(plan), as_json=json)
            return
        server = server_options(context)
        result = ingest_command(
            paths,
            out,
            server=server,
            options=kept,
            workers=context.params["workers"],
            engine=engine_options(context),
            progress=terminal,
        )
        terminal.show(result, ingest_text(result), as_json=json)


@app.command()
@takes(SERVER)
def receive(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="Folder of run folders; one is made for each service that sends.")
    ],
    model: Annotated[
        Optional[str], typer.Option(help="Model the servers run, as `vllm serve` names it.")
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any that is not loopback needs TLS or --insecure.")
    ] = "127.0.0.1",
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OTLP/gRPC; 0 takes a free one.")
    ] = 4317,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of OTLP/HTTP; 0 takes a free one.")
    ] = 4318,
    tls_cert: Annotated[
        Optional[Path], typer.Option(help="Certificate chain, PEM; goes with --tls-key.")
    ] = None,
    tls_key: Annotated[Optional[Path], typer.Option(help="Private key of the certificate, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without TLS.")
    ] = False,
    token_file: Annotated[
        Optional[Path],
        typer.Option(help="File with the token that senders present as `authorization: Bearer TOKEN`."),
    ] = None,
    rotate: Annotated[
        str, typer.Option(metavar="SIZE,TIME", help="Begin a new file at this size, or after this time.")
    ] = "64MiB,5min",
    stop_after: Annotated[
        Optional[str],
        typer.Option(metavar="TIME", help="Stop by itself after this time, such as 10min; else on SIGTERM."),
    ] = None,
    all_spans: AllSpans = False,
    keep_attributes: KeepAttributes = None,
    live: Annotated[bool, typer.Option("--live", help="Show on the terminal what comes in.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Receive traces from running servers into run folders.

    OTLP over gRPC and HTTP, as vLLM sends it, without a collector. A request is acknowledged when it is on disk.

    Example: `tracefit receive --out traces/ --model meta-llama/Llama-3.1-8B-Instruct --gpu H100 --live`
    """
    with command(f"receive to {out}", quiet=quiet) as terminal:
        from tracefit.commands.receive import receive as receive_command
        from tracefit.receive.options import ReceiveOptions, parse_duration, parse_rotation
        from tracefit.reports.terminal_results import receive_text

        def listening(at: Listening) -> None:
            if not quiet:
                where = f"{at.host}:{at.grpc_port} (gRPC) and {at.host}:{at.http_port} (HTTP)"
                typer.echo(f"listening on {where}; writing to {at.out}", err=True)

        options = ReceiveOptions(
            host=host,
            grpc_port=grpc_port,
            http_port=http_port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            token_file=token_file,
            rotation=parse_rotation(rotate),
            all_spans=all_spans,
            keep_attributes=keys_of(keep_attributes),
            stop_after_s=parse_duration(stop_after, option="--stop-after") if stop_after else None,
        )
        result = receive_command(
            out,
            # Before the settings of --set, which win over it.
            server=server_options(context, *([f"model={model}"] if model else [])),
            options=options,
            live=live,
            listening=listening,
            progress=terminal,
        )
        terminal.show(result, receive_text(result), as_json=json)


# Commands import what they need when they run: help and completion must not wait for polars and scikit-learn. The function of
# the library has the command's own name, so that it is imported as another one.
@app.command()
@takes(TRAIN, ENGINE)
def train(
    context: typer.Context,
    tables: TablesFolder,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for the models, the evaluation and the report."
        ),
    ],
    *,
    json: Json = False,
    quiet: Quiet = False,
    **_options: Any,
) -> None:
    """Fit coefficient files on tables, with a report.

    Example: `tracefit train tables/ --out models/`
    """
    with command(f"train on {tables}", quiet=quiet) as terminal:
        from tracefit.commands.train import train as train_command
        from tracefit.reports.terminal_results import train_text

        options = train_options(context)
        result = train_command(
            tables,
            out,
            options=options,
            workers=context.params["workers"],
            engine=engine_options(context),
            progress=terminal,
        )
        terminal.show(result, train_text(result), as_json=json)


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
    """Write the report again, and print its verdicts.

    Example: `tracefit report out/`
    """
    with command(f"report of {folder}", quiet=quiet) as terminal:
        from tracefit.commands.report import parse_slo
        from tracefit.commands.report import report as report_command
        from tracefit.reports.terminal_results import report_text

        objectives = parse_slo(slo or [])
        result = report_command(folder, tables=tables, out=out, slo_ms=objectives, progress=terminal)
        terminal.show(result, report_text(result), as_json=json)


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
    with command(f"compare {first} with {second}", quiet=quiet) as terminal:
        from tracefit.commands.compare import Tolerance
        from tracefit.commands.compare import compare as compare_command
        from tracefit.reports.terminal_results import compare_text

        result = compare_command(first, second, scope=scope, run=run, tolerance=Tolerance(tolerance, slack))
        terminal.show(result, compare_text(result), as_json=json)


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
    with command(f"verify {file}", quiet=quiet) as terminal:
        from tracefit.commands.verify import verify as verify_command
        from tracefit.reports.terminal_results import verify_text

        result = verify_command(file, tables, features=features, progress=terminal)
        terminal.show(result, verify_text(result), as_json=json)


@app.command()
def requests(
    tables: TablesFolder,
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="Print one line per request, in seconds and under vLLM's names, as CSV or JSON."
        ),
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout; times in seconds.")] = False,
    json: Json = False,
) -> None:
    """Summarize requests: failures, latencies, throughput.

    Percentiles of TTFT, ITL, E2E and queue wait; by run, by phase and over time.

    Example: `tracefit requests out/`
    """
    with command(f"requests of {tables}") as terminal:
        from tracefit.commands.requests import requests as requests_command
        from tracefit.commands.requests import seconds_csv, seconds_view
        from tracefit.reports.terminal_results import requests_csv, requests_text

        if each:
            rows = seconds_view(tables)
            # A run has up to a million requests: they become dicts only with --json.
            terminal.show(rows.to_dicts() if json else (), seconds_csv(rows), as_json=json)
            return
        summary = requests_command(tables)
        text = requests_csv(summary) if csv else requests_text(summary)
        terminal.show(summary, text, as_json=json)


# Options that one of the two questions alone has: those of the other are left at their defaults.
_OF_STEP = ("prefill", "prefill_reqs", "waiting")
_OF_REQUEST = ("queue", "cached")


@app.command()
def predict(
    context_: typer.Context,
    models: Annotated[
        list[Path], typer.Argument(help="Coefficient files, or a folder that train or run wrote.")
    ],
    scope: ScopeName = None,
    run: RunName = None,
    batch: Annotated[
        Optional[float],
        typer.Option(
            min=0,
            help="Requests that decode. For a request: those that run beside it; if not given, none with an empty queue, "
            "else as many as slots and KV blocks hold.",
        ),
    ] = None,
    context: Annotated[
        Optional[float], typer.Option(min=0, help="Mean tokens in the caches of the requests of --batch.")
    ] = None,
    prefill: Annotated[float, typer.Option(min=0, help="Prompt tokens computed in the step.")] = 0,
    prefill_reqs: Annotated[
        Optional[float], typer.Option(min=0, help="Requests that the prompt tokens of the step belong to.")
    ] = None,
    waiting: Annotated[float, typer.Option(min=0, help="Requests in the queue during the step.")] = 0,
    prompt: Annotated[
        Optional[float], typer.Option(min=1, help="Prompt tokens of a request: predicts the request.")
    ] = None,
    output: Annotated[float, typer.Option(min=1, help="Tokens the request generates.")] = 1,
    queue: Annotated[float, typer.Option(min=0, help="Requests waiting ahead of it.")] = 0,
    cached: Annotated[float, typer.Option(min=0, help="Prompt tokens found in the prefix cache.")] = 0,
    feature: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME=NUMBER",
            help="A feature or table column as it is, such as running_depth, the requests that run when it arrives; "
            "repeatable.",
        ),
    ] = None,
    rows: Annotated[
        Optional[Path], typer.Option(help="A .csv, .parquet or .ndjson file: predicts every row.")
    ] = None,
    of: Annotated[
        str, typer.Option(help="What the rows are: step, request, or a model's name with its features.")
    ] = "step",
    out: Annotated[
        Optional[Path], typer.Option(help="Write the predicted rows here, by suffix; else CSV on stdout.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict steps and requests from coefficient files alone.

    A described step: `--batch 32 --context 1500 --prefill 512`. A described request: `--prompt 800 --output 250 --queue 12`.

    Example: `tracefit predict models/ --scope codellama-34b --batch 32`
    """
    with command(f"predict with {models[0]}", quiet=quiet) as terminal:
        from tracefit.coefficients.models import load
        from tracefit.commands.locate import choose_scope

        loaded = load(*models)
        chosen = choose_scope(loaded, scope, run)
        # typer has no way to say which options belong together.
        _check_description(context_.params)
        if rows is not None:
            from tracefit.commands.predict import predict as predict_rows
            from tracefit.reports.terminal_results import rows_text

            found = predict_rows(loaded, rows, of=of, scope=chosen, out=out, progress=terminal)
            terminal.show(found, rows_text(found), as_json=json)
        else:
            predicted, text = _predict_one(loaded, chosen, context_.params)
            terminal.show(predicted, text, as_json=json)


def _predict_one(models: Any, scope: str | None, given: dict[str, Any]) -> tuple[Any, str]:
    """Predict the request or the step that the options describe; return the prediction and its text."""
    from tracefit.commands.predict import parse_features
    from tracefit.reports.terminal_results import request_text, step_text

    features = parse_features(given["feature"] or [])
    if given["prompt"] is not None:
        request = models.predict_request(
            scope=scope,
            prompt_tokens=given["prompt"],
            output_tokens=given["output"],
            batch=given["batch"],
            context=given["context"],
            features=features,
            **{name: given[name] for name in _OF_REQUEST},
        )
        return request, request_text(request)
    step = models.predict_step(
        scope=scope,
        batch=given["batch"] or 0,
        context=given["context"] or 0,
        features=features,
        **{name: given[name] for name in _OF_STEP},
    )
    return step, step_text(step)


def _check_description(given: dict[str, Any]) -> None:
    """Refuse options that the prediction would leave unread: those of a request without its prompt, those of a step beside it."""
    of_request = [f"--{name}" for name in _OF_REQUEST if given[name]]
    of_request += ["--output"] if given["output"] != 1 else []
    of_step = [f"--{name.replace('_', '-')}" for name in _OF_STEP if given[name]]
    of_one = ("prompt", "batch", "context", "feature")
    described = [*(f"--{name}" for name in of_one if given[name]), *of_request, *of_step]
    if given["rows"] is not None:
        if described:
            raise UsageError(
                f"{described[0]} describes one prediction, --rows has many", hint="make it a column"
            )
        return
    if given["prompt"] is None and of_request:
        raise UsageError(f"{of_request[0]} describes a request", hint="give its --prompt too")
    if given["prompt"] is not None and of_step:
        raise UsageError(f"{of_step[0]} describes a step, --prompt a request", hint="leave one of them out")
    if not any((given["prompt"], given["batch"], given["prefill"], given["feature"])):
        raise UsageError(
            "nothing to predict",
            hint="describe a step (--batch, --prefill) or a request (--prompt, --output)",
        )


# For the completion of a shell: consumers are imported when a user presses TAB, not when the program starts.
def _consumer_names() -> list[str]:
    from tracefit.consumers import known

    return list(known())


@app.command()
def export(
    models: ModelFiles,
    to: Annotated[
        str,
        typer.Option(
            help="The consumer, such as blis, wva or csv; an unknown name lists all of them.",
            autocompletion=_consumer_names,
        ),
    ],
    out: Annotated[str, typer.Option(metavar="PATH", help="Folder for the consumer's files.")],
    tables: Annotated[
        Optional[str],
        typer.Option(
            metavar="PATH", help="Tables the models were trained on; found beside the models if not given."
        ),
    ] = None,
    scope: ScopeName = None,
    run: RunName = None,
    consumer_version: Annotated[
        Optional[str],
        typer.Option(
            metavar="VERSION",
            help="Version of the consumer, such as 0.9.2, where older ones need another form; the newest if not given.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write coefficients in the form a consumer loads.

    They are refitted in the consumer's form, with its held-out error. What cannot be converted is refused with the reason (exit code 1).

    Example: `tracefit export out/ --to blis --scope codellama-34b --out blis/`
    """
    with command(f"export of {models} to {to}", quiet=quiet) as terminal:
        from tracefit.commands.export import export as export_command
        from tracefit.reports.terminal_results import export_text

        result = export_command(
            models, to, out, tables=tables, scope=scope, run=run, consumer_version=consumer_version
        )
        terminal.show(result, export_text(result), as_json=json)


# A run must not hold a span twice: `both` writes two run folders.
_FORMATS: dict[str, tuple[Literal["json", "protobuf"], ...]] = {
    "json": ("json",),
    "protobuf": ("protobuf",),
    "both": ("json", "protobuf"),
}


@app.command()
def features(
    names: Annotated[
        Optional[list[str]],
        typer.Argument(help="Built-in sets or files; every built-in set if none is named."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the declared feature sets.

    Name, unit, formula and reason of every feature.

    Example: `tracefit features batch`
    """
    with command("features") as terminal:
        from tracefit.commands.train import beta_feature_sets
        from tracefit.features.sets import BUILT_IN
        from tracefit.reports.terminal_results import features_text

        # As `train --features` reads them: what is shown here is what would be fitted.
        sets = [s for name in names or BUILT_IN for s in beta_feature_sets(name)]
        terminal.show(sets, features_text(sets), as_json=json)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")],
    name: Annotated[str, typer.Option(help="Name of the run folder.")] = "synth-run",
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    law: Annotated[
        Literal["linear", "roofline"],
        typer.Option(help="Step-time law; its coefficients are in truth.json."),
    ] = "linear",
    model: Annotated[str, typer.Option(help="Model preset, such as llama-8b.")] = "llama-8b",
    gpu: Annotated[str, typer.Option(help="GPU preset, such as H100.")] = "H100",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests per server.")] = 300,
    rate: Annotated[float, typer.Option(help="Mean arrivals per second.")] = 14.0,
    surge: Annotated[
        Optional[float],
        typer.Option(
            help="Factor on the arrivals in the last 30 % of the time, steady before; light, burst and heavy load if not "
            "given."
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=2, help="KV blocks; few of them cause a queue and preemptions.")
    ] = 4097,
    noise: Annotated[
        float, typer.Option(min=0, help="Sigma of the log-normal factor on a step's time.")
    ] = 0.03,
    step_sampling: Annotated[float, typer.Option(min=0, max=1, help="Share of steps traced.")] = 1.0,
    rich_sampling: Annotated[
        float, typer.Option(min=0, max=1, help="Share of traced steps with request snapshots.")
    ] = 0.0,
    journey_sampling: Annotated[float, typer.Option(min=0, max=1, help="Share of requests traced.")] = 1.0,
    duration: Annotated[
        Literal["schedule", "step"],
        typer.Option(help="What step.duration_us holds: time in schedule(), or the step's time."),
    ] = "schedule",
    queued_stamp: Annotated[
        Literal["step_start", "arrival"],
        typer.Option(help="QUEUED at the step start after the API work, or at the end of that work itself."),
    ] = "step_start",
    format_: Annotated[
        Literal["json", "protobuf", "both"],
        typer.Option("--format", help="JSON lines, framed protobuf, or a run folder of each."),
    ] = "json",
    compress: Annotated[
        Literal["none", "gz", "zst"], typer.Option(help="Compression of the trace files.")
    ] = "none",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate traces with known coefficients.

    They have the form of real traces, with the truth beside them.

    Example: `tracefit synth --out runs/ --requests 600 --law linear`
    """
    with command(f"synth to {out}", quiet=quiet) as terminal:
        from tracefit.commands.generate import generate
        from tracefit.reports.terminal_results import synth_text
        from tracefit.synth import DEFAULT_PHASES, SynthOptions, surge_phases

        # Without --surge the load is light, bursts, and is heavy: a queue builds up and empties.
        options = SynthOptions(
            name=name,
            seed=seed,
            law=law,
            model=model,
            gpu=gpu,
            tp=tp,
            requests=requests,
            rate_per_s=rate,
            phases=DEFAULT_PHASES if surge is None else surge_phases(surge),
            num_blocks=blocks,
            noise=noise,
            step_sampling=step_sampling,
            rich_sampling=rich_sampling,
            journey_sampling=journey_sampling,
            queued_stamp=queued_stamp,
            duration=duration,
        )
        result = generate(
            out,
            options,
            formats=_FORMATS[format_],
            compress=None if compress == "none" else compress,
            progress=terminal,
        )
        terminal.show(result, synth_text(result), as_json=json)
