"""The commands of `tracefit`: four read traces (run, inspect, ingest, receive), the others make models or use them.

Each collects its options, calls the function of the library with its own name, and returns the result to be shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

import tracefit
from tracefit.cli.arguments import (
    DESCRIPTION,
    ENGINE,
    INGEST,
    OUTPUT,
    PLAN,
    RECEIVE,
    SERVER,
    SYNTH,
    TRAIN,
    InspectPaths,
    ModelFiles,
    Paths,
    RunName,
    ScopeName,
    TablesFolder,
    engine_options,
    ingest_options,
    load_options,
    receive_options,
    server_options,
    train_options,
)
from tracefit.cli.program import command
from tracefit.console import Terminal
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from tracefit.coefficients.models import Models
    from tracefit.commands.receive import Listening

# The functions of the library are imported when they are first used: help and completion must not wait for polars and scikit-learn.


_JSON = {"json": OUTPUT["json"]}


@command("run to {out}", SERVER, INGEST, ENGINE, TRAIN)
def run(
    terminal: Terminal,
    paths: Paths,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for tables, models, evaluation and report."
        ),
    ],
    **options: Any,
) -> object:
    """Turn traces into tables, coefficients and a report.

    Example: `tracefit run runs/ --out out/`
    """
    return tracefit.run(
        paths,
        out,
        server=server_options(options),
        ingest_options=ingest_options(options),
        options=train_options(options),
        **engine_options(options),
        progress=terminal,
    )


@command("inspect", SERVER)
def inspect(terminal: Terminal, paths: InspectPaths, **options: Any) -> object:
    """Describe traces, and what can be trained from them.

    Formats, services, sampling, events and the health of the journeys; nothing is fitted or written. Exit code 1 when
    nothing can be trained.

    Example: `tracefit inspect runs/`
    """
    return tracefit.inspect(paths, server=server_options(options), progress=terminal)


@command("ingest to {out}", SERVER, INGEST, ENGINE)
def ingest(
    terminal: Terminal,
    paths: Paths,
    out: Annotated[str, typer.Option(metavar="PATH", help="The tables folder, or its s3:// or gs:// URL.")],
    *,
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
    kept = ingest_options(options)
    # A plan depends on the files and on what the tables have, not on the server: its options are not even read.
    if dry_run:
        from tracefit.commands.ingest import plan_ingest
        from tracefit.reports.terminal_results import ingest_plan_text

        reads = plan_ingest(paths, out, options=kept)
        return reads, ingest_plan_text(reads)
    return tracefit.ingest(
        paths, out, server=server_options(options), options=kept, **engine_options(options), progress=terminal
    )


@command("receive to {out}", SERVER, RECEIVE)
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
    scope: Annotated[
        Optional[str],
        typer.Option(
            help="Scope id, or a part of it that is unique; needed where --models has several scopes."
        ),
    ] = None,
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
        options=receive_options(options),
        # Before the settings of --set, which win over it.
        server=server_options(options, *([f"model={model}"] if model else [])),
        live=live,
        models=models,
        scope=scope,
        listening=listening,
        progress=terminal,
    )


@command("train on {tables}", TRAIN, ENGINE)
def train(
    terminal: Terminal,
    tables: TablesFolder,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Folder or s3:// or gs:// URL for the models, the evaluation and the report."
        ),
    ],
    **options: Any,
) -> object:
    """Fit coefficient files on tables, with a report.

    Example: `tracefit train tables/ --out models/`
    """
    how = train_options(options)
    return tracefit.train(tables, out, options=how, **engine_options(options), progress=terminal)


@command("report of {folder}")
def report(
    terminal: Terminal,
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
) -> object:
    """Write the report again, and print its verdicts.

    Example: `tracefit report out/`
    """
    from tracefit.commands.report import parse_slo

    return tracefit.report(folder, tables=tables, out=out, slo_ms=parse_slo(slo or []), progress=terminal)


@command("compare {first} with {second}")
def compare(
    terminal: Terminal,
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
) -> object:
    """Compare two coefficient files, or check one on new traces.

    A drift check exits with 0 if the file is still good, and with 1 if it has drifted or the new traces cannot tell.

    Example: `tracefit compare models/ new-tables/`
    """
    from tracefit.commands.compare import Tolerance

    return tracefit.compare(first, second, scope=scope, run=run, tolerance=Tolerance(tolerance, slack))


@command("verify {file}")
def verify(
    terminal: Terminal,
    file: ModelFiles,
    tables: Annotated[
        Optional[str],
        typer.Option(metavar="PATH", help="Tables it was trained on; found beside the models if not given."),
    ] = None,
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
    run: RunName = None,
) -> object:
    """Replay the held-out part of runs with their models.

    Queue, batches and steps follow from them. Requests come when they came, and are as long as they were;
    what is in flight at the beginning is given. Times, throughput and the queue stand beside those measured.

    Example: `tracefit replay out/`
    """
    return tracefit.replay_runs(folder, run=run, progress=terminal)


@command("plan with {folders[0]}", PLAN)
def plan(
    terminal: Terminal,
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="OUT...",
            help="Folders that `tracefit run` wrote, or with coefficient files; each scope is a kind of server.",
        ),
    ],
    scope: ScopeName = None,
    run: RunName = None,
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
        rate=options["rate"],
        servers=options["servers"],
        slo_ms=parse_slo(options["slo"] or []),
        settings=parse_assignments(options["settings"] or []),
        requests=load_options(options),
        price=options["price"],
        figure=options["figure"],
        scope=scope,
        run=run,
        progress=terminal,
    )


@command("requests of {tables}", output=_JSON)
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


# Options that one of the two questions alone has: those of the other are left at their defaults.
_OF_STEP = ("prefill", "prefill_reqs", "waiting")
_OF_REQUEST = ("queue", "cached")


@command("predict with {models[0]}", DESCRIPTION)
def predict(
    terminal: Terminal,
    models: Annotated[
        list[Path], typer.Argument(help="Coefficient files, or a folder that train or run wrote.")
    ],
    scope: ScopeName = None,
    run: RunName = None,
    *,
    rows: Annotated[
        Optional[Path], typer.Option(help="A .csv, .parquet or .ndjson file: predicts every row.")
    ] = None,
    of: Annotated[
        str, typer.Option(help="Kind of the rows: step, request, or a model's name with its features.")
    ] = "step",
    out: Annotated[
        Optional[Path], typer.Option(help="Write the predicted rows here, by suffix; else CSV on stdout.")
    ] = None,
    **options: Any,
) -> object:
    """Predict steps and requests from coefficient files alone.

    A described step: `--batch 32 --context 1500 --prefill 512`. A described request: `--prompt 800 --output 250 --queue 12`.

    Example: `tracefit predict models/ --scope codellama-34b --batch 32`
    """
    from tracefit.coefficients.models import load
    from tracefit.commands.locate import choose_scope

    loaded = load(*models)
    chosen = choose_scope(loaded, scope, run)
    # typer has no way to say which options belong together.
    _check_description(options, has_rows=rows is not None)
    if rows is None:
        return _predict_one(loaded, chosen, options)
    from tracefit.reports.terminal_results import rows_text

    found = tracefit.predict(loaded, rows, of=of, scope=chosen, out=out, progress=terminal)
    return found, rows_text(found)


def _predict_one(models: Models, scope: str | None, given: dict[str, Any]) -> tuple[Any, str]:
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


def _check_description(given: dict[str, Any], *, has_rows: bool) -> None:
    """Refuse options that the prediction would leave unread: those of a request without its prompt, those of a step beside it."""
    of_request = [f"--{name}" for name in _OF_REQUEST if given[name]]
    of_request += ["--output"] if given["output"] != 1 else []
    of_step = [f"--{name.replace('_', '-')}" for name in _OF_STEP if given[name]]
    of_one = ("prompt", "batch", "context", "feature")
    described = [*(f"--{name}" for name in of_one if given[name]), *of_request, *of_step]
    if has_rows:
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


@command("export of {models} to {to}")
def export(
    terminal: Terminal,
    models: ModelFiles,
    to: Annotated[
        str,
        typer.Option(
            help="The consumer, such as blis, dynamo-mocker or csv; an unknown name lists all of them.",
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
) -> object:
    """Write coefficients in the form a consumer loads.

    They are refitted in the consumer's form, with its held-out error. A model that cannot be converted is refused with the reason (exit code 1).

    Example: `tracefit export out/ --to blis --scope codellama-34b --out blis/`
    """
    return tracefit.export(
        models, to, out, tables=tables, scope=scope, run=run, consumer_version=consumer_version
    )


# A run must not hold a span twice: `both` writes two run folders.
_FORMATS: dict[str, tuple[Literal["json", "protobuf"], ...]] = {
    "json": ("json",),
    "protobuf": ("protobuf",),
    "both": ("json", "protobuf"),
}


@command("features", output=_JSON)
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


@command("synth to {out}", SYNTH)
def synth(
    terminal: Terminal,
    out: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")],
    *,
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
    from tracefit.synth import DEFAULT_PHASES, SynthOptions, surge_phases

    # Without --surge the load is light, bursts, and is heavy: a queue builds up and empties.
    surge = options.pop("surge")
    phases = DEFAULT_PHASES if surge is None else surge_phases(surge)
    return generate(
        out,
        SynthOptions(phases=phases, **options),
        formats=_FORMATS[format_],
        compress=None if compress == "none" else compress,
        progress=terminal,
    )
