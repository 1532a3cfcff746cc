"""The command line: arguments to one call into the library. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from tracefit._version import __version__
from tracefit.console import LogLevel, Terminal, called, one_line_errors, set_log_level, show, warn
from tracefit.memory import keep_little
from tracefit.options import Commands, unknown_variables, use_config

if TYPE_CHECKING:
    from tracefit.verbs.ingest import IngestOptions, ServerOptions

_HELP = """From vLLM OpenTelemetry traces to latency coefficients one can trust.

Every option can also be set by an environment variable (`TRACEFIT_BETA_TARGET` for `--beta-target`) or in the TOML file
of `--config` (`beta-target = "clock"`, for every command or below `[run]` for one). A flag wins over the environment, the
environment over the file.

Exit codes: 0 done; 1 the data cannot support the result; 2 usage; 3 done, with something in quarantine (unreadable
records, events the server's SDK dropped, duplicate spans); 130 interrupted.
"""

app = typer.Typer(
    name="tracefit",
    cls=Commands,
    help=_HELP,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


class BetaTarget(StrEnum):
    """Which step time to fit."""

    auto = "auto"
    clock = "clock"
    duration = "duration"


class Law(StrEnum):
    """Step-time law of generated traces."""

    linear = "linear"
    roofline = "roofline"


class DurationMode(StrEnum):
    """What step.duration_us of generated traces holds."""

    schedule = "schedule"
    step = "step"


class TraceFormat(StrEnum):
    """File format of generated traces."""

    json = "json"
    protobuf = "protobuf"
    both = "both"


class Compression(StrEnum):
    """Compression of generated traces."""

    none = "none"
    gz = "gz"
    zst = "zst"


_FORMATS: dict[TraceFormat, tuple[Literal["json", "protobuf"], ...]] = {
    TraceFormat.json: ("json",),
    TraceFormat.protobuf: ("protobuf",),
    TraceFormat.both: ("json", "protobuf"),
}
_COMPRESSIONS: dict[Compression, Literal["gz", "zst"] | None] = {
    Compression.none: None,
    Compression.gz: "gz",
    Compression.zst: "zst",
}

Paths = Annotated[
    list[str],  # not Path, which would make one slash of the two in a URL
    typer.Argument(
        help="Run folders, folders of run folders, trace files (which make one run together), patterns, "
        "s3:// or gs:// URLs, or - for standard input."
    ),
]
InspectPaths = Annotated[
    list[str],
    typer.Argument(
        help="Run folders, folders of run folders, or trace files; or one tables folder that ingest wrote."
    ),
]
RunConfig = Annotated[
    Optional[Path],
    typer.Option(
        help="exp-config.yaml or run.yaml, a `vllm serve` command line, or a server log, for every run."
    ),
]
ModelConfig = Annotated[Optional[Path], typer.Option(help="The model's config.json, for every run.")]
GpuName = Annotated[
    Optional[str],
    typer.Option(help="GPU name, such as H100, or a JSON file that describes one."),
]
TensorParallel = Annotated[Optional[int], typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]
Settings = Annotated[
    Optional[list[str]],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any server setting, such as max_num_seqs=128; repeatable."
    ),
]
ScopeName = Annotated[
    Optional[str],
    typer.Option(help="Scope id, or a part of it that only one has; needed where there are several."),
]
AllSpans = Annotated[
    bool, typer.Option("--all-spans", help="Keep spans of other services too, in the spans table alone.")
]
KeepAttributes = Annotated[
    Optional[list[str]],
    typer.Option(
        metavar="KEY,...",
        help="Span attributes to keep beside ids, counts, routes, the model and sampling parameters; repeatable.",
    ),
]
ShowValues = Annotated[
    bool,
    typer.Option(
        "--show-values",
        help="Show what is in rejected records, not their structure alone: it is private data.",
    ),
]
Workers = Annotated[
    Optional[int],
    typer.Option(
        min=1, help="Processes that decode traces, at most; as many as there are cores if not given."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Target = Annotated[
    BetaTarget,
    typer.Option(
        help="Step times from the step clock, from step.duration_us, or from whichever covers the busy time."
    ),
]
Features = Annotated[
    str,
    typer.Option(
        help="Feature set for step times: batch, roofline, a YAML or JSON file, or auto: validation chooses."
    ),
]
Thresholds = Annotated[
    Optional[list[str]],
    typer.Option(
        "--threshold",
        metavar="USE.MEASURE=YES:WITH_LIMITS",
        help="What is asked of the models for a use, such as simulation.step_mape_pct=12:30; repeatable.",
    ),
]
SampleCsv = Annotated[
    bool, typer.Option("--sample-csv", help="Also write the specification's two sample tables.")
]
Positive = Annotated[
    bool, typer.Option("--positive", help="Allow no negative coefficient and no negative intercept.")
]
Fast = Annotated[
    bool, typer.Option("--fast", help="Skip the gradient-boosted references: most of the training time.")
]
IncludeOverloaded = Annotated[
    bool,
    typer.Option("--include-overloaded", help="Train on overloaded runs too, where their scope has others."),
]
Across = Annotated[
    bool,
    typer.Option(
        "--across",
        help="Also leave out every run, model and GPU in turn; errors of models fitted on the others.",
    ),
]


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
    version: Annotated[  # the callbacks do what these options ask for
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


@app.command()
def run(
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
    workers: Workers = None,
    beta_target: Target = BetaTarget.auto,
    features: Features = "auto",
    sample_csv: SampleCsv = False,
    positive: Positive = False,
    fast: Fast = False,
    include_overloaded: IncludeOverloaded = False,
    across: Across = False,
    thresholds: Thresholds = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The main job: traces to tables, coefficient files, evaluation and report.

    Example: `tracefit run runs/ --out out/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.coefficients.verdicts import override
        from tracefit.reports.summary import run_text
        from tracefit.verbs.run import run as run_verb
        from tracefit.verbs.train import TrainOptions

        server = _server(run_config, model_config, gpu, tp, settings)
        kept = _kept(keep_attributes, all_spans=all_spans, show_values=show_values)
        options = TrainOptions(
            beta_target=beta_target.value,
            features=features,
            sample_csv=sample_csv,
            positive=positive,
            fast=fast,
            include_overloaded=include_overloaded,
            across=across,
            thresholds=override(thresholds or []),
        )
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
    """What is in traces, how healthy they are, and what can be trained from them; nothing is fitted or written.

    Exit code 1 when nothing can be trained from them.

    Example: `tracefit inspect runs/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.reports.inspection import inspection_text
        from tracefit.verbs.inspect import inspect as inspect_verb

        server = _server(run_config, model_config, gpu, tp, settings)
        result = inspect_verb(paths, server=server, progress=told)
        told.close()
        show(result, inspection_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def ingest(
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
    workers: Workers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read, and as what; write nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Traces to Parquet tables. What the folder has already is not read again.

    Example: `tracefit ingest runs/ --out tables/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.reports.summary import ingest_text, plan_text
        from tracefit.verbs.ingest import ingest as ingest_verb
        from tracefit.verbs.plan import plan_ingest

        kept = _kept(keep_attributes, all_spans=all_spans, show_values=show_values)
        if dry_run:
            plan = plan_ingest(paths, out, options=kept)
            show(plan, plan_text(plan), as_json=json, quiet=quiet)
            return
        server = _server(run_config, model_config, gpu, tp, settings)
        result = ingest_verb(paths, out, server=server, options=kept, workers=workers, progress=told)
        told.close()
        show(result, ingest_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def train(
    tables: Annotated[Path, typer.Argument(help="A tables folder that ingest wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the models, the evaluation and the report.")],
    beta_target: Target = BetaTarget.auto,
    features: Features = "auto",
    sample_csv: SampleCsv = False,
    positive: Positive = False,
    fast: Fast = False,
    include_overloaded: IncludeOverloaded = False,
    across: Across = False,
    thresholds: Thresholds = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tables to coefficient files, evaluation and report.

    Example: `tracefit train tables/ --out models/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.coefficients.verdicts import override
        from tracefit.reports.summary import train_text
        from tracefit.verbs.train import TrainOptions
        from tracefit.verbs.train import train as train_verb

        options = TrainOptions(
            beta_target=beta_target.value,
            features=features,
            sample_csv=sample_csv,
            positive=positive,
            fast=fast,
            include_overloaded=include_overloaded,
            across=across,
            thresholds=override(thresholds or []),
        )
        result = train_verb(tables, out, options=options, progress=told)
        told.close()
        show(result, train_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


@app.command()
def requests(
    tables: Annotated[Path, typer.Argument(help="A tables folder that ingest wrote.")],
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="One line per request instead, in seconds and under vLLM's names, as CSV or JSON."
        ),
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout; times in seconds.")] = False,
    json: Json = False,
) -> None:
    """Summarize requests: failures, percentiles of TTFT, ITL, E2E and queue, throughput, by run, phase and time.

    Example: `tracefit requests tables/`
    """
    told = Terminal(quiet=False)
    with one_line_errors(told):
        from tracefit.reports.requests import requests_csv, requests_text
        from tracefit.verbs.requests import seconds_view, summarize_requests

        if each:
            rows = seconds_view(tables)
            show(rows.to_dicts() if json else (), rows.write_csv(), as_json=json, quiet=False)
            return
        summary = summarize_requests(tables)
        text = requests_csv(summary) if csv else requests_text(summary)
        show(summary, text, as_json=json, quiet=False)


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
        from tracefit.verbs.report import report as report_verb

        result, made = report_verb(folder, tables=tables, out=out, progress=told)
        told.close()
        if json or quiet:
            show(result, "", as_json=json, quiet=quiet)
        else:
            from rich.console import Console

            from tracefit.reports.terminal import print_report

            print_report(made, Console())


@app.command()
def features(
    names: Annotated[
        Optional[list[str]],
        typer.Argument(help="Built-in sets or files; every built-in set if none is named."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the declared feature sets: name, unit, formula and reason of every feature.

    Example: `tracefit features batch`
    """
    told = Terminal(quiet=False)
    with one_line_errors(told):
        from tracefit.features.sets import BUILT_IN
        from tracefit.reports.summary import features_text
        from tracefit.verbs.train import beta_feature_sets

        sets = [s for name in names or BUILT_IN for s in beta_feature_sets(name)]
        show(sets, features_text(sets), as_json=json, quiet=False)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")],
    name: Annotated[str, typer.Option(help="Name of the run folder.")] = "synth-run",
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    law: Annotated[Law, typer.Option(help="Step-time law; its coefficients are in truth.json.")] = Law.linear,
    model: Annotated[str, typer.Option(help="Model preset, such as llama-8b.")] = "llama-8b",
    gpu: Annotated[str, typer.Option(help="GPU preset, such as H100.")] = "H100",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests per server.")] = 300,
    rate: Annotated[float, typer.Option(help="Mean arrivals per second.")] = 14.0,
    blocks: Annotated[
        int, typer.Option(min=2, help="KV blocks; few of them make a queue and preemptions.")
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
        DurationMode,
        typer.Option(help="What step.duration_us holds: time in schedule(), or the step's time."),
    ] = DurationMode.schedule,
    format_: Annotated[
        TraceFormat, typer.Option("--format", help="JSON lines, framed protobuf, or a run folder of each.")
    ] = TraceFormat.json,
    compress: Annotated[Compression, typer.Option(help="Compression of the trace files.")] = Compression.none,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate traces with known coefficients, in the real emitter's shape, the truth beside them.

    Example: `tracefit synth --out runs/ --requests 600 --law linear`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.reports.summary import synth_text
        from tracefit.synth import SynthOptions
        from tracefit.verbs.generate import generate

        options = SynthOptions(
            name=name,
            seed=seed,
            law=law.value,
            model=model,
            gpu=gpu,
            tp=tp,
            requests=requests,
            rate_per_s=rate,
            num_blocks=blocks,
            noise=noise,
            step_sampling=step_sampling,
            rich_sampling=rich_sampling,
            journey_sampling=journey_sampling,
            duration=duration.value,
        )
        result = generate(
            out,
            options,
            formats=_FORMATS[format_],
            compress=_COMPRESSIONS[compress],
            progress=told,
        )
        told.close()
        show(result, synth_text(result), as_json=json, quiet=quiet)


@app.command()
def predict(
    models: Annotated[
        list[Path], typer.Argument(help="Coefficient files, or a folder with alpha.json and beta.json.")
    ],
    scope: ScopeName = None,
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
        typer.Option(metavar="NAME=NUMBER", help="A feature or table column as it is; repeatable."),
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

    Example: `tracefit predict models/ --scope llama-3.1-8b --batch 32 --context 1500 --prefill 512`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.coefficients.models import load
        from tracefit.reports.use import request_text, rows_text, step_text
        from tracefit.verbs.predict import parse_features, predict_file

        loaded, features = load(*models), parse_features(feature or [])
        if rows is not None:
            answers = predict_file(loaded, rows, of=of, scope=scope, out=out)
            show(answers, rows_text(answers), as_json=json, quiet=quiet)
        elif prompt is not None:
            request = loaded.predict_request(
                scope=scope,
                prompt_tokens=prompt,
                output_tokens=output,
                queue=queue,
                batch=batch,
                context=context,
                cached=cached,
                features=features,
            )
            show(request, request_text(request), as_json=json, quiet=quiet)
        else:
            step = loaded.predict_step(
                scope=scope,
                batch=batch or 0,
                context=context or 0,
                prefill=prefill,
                prefill_reqs=prefill_reqs,
                waiting=waiting,
                features=features,
            )
            show(step, step_text(step), as_json=json, quiet=quiet)


@app.command()
def export(
    models: Annotated[
        Path, typer.Argument(help="A coefficient file, or a folder with alpha.json and beta.json.")
    ],
    to: Annotated[
        str, typer.Option(help="blis, blis-registry, llm-d-inference-sim, wva, dynamo-mocker or csv.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the consumer's files.")],
    tables: Annotated[
        Optional[Path],
        typer.Option(help="Tables the models were trained on; found beside the models if not given."),
    ] = None,
    scope: ScopeName = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write what a consumer loads, fitted on its own terms, with the held-out error of exactly that.

    What cannot be converted is refused with the reason (exit code 1).

    Example: `tracefit export out/models --to blis --scope llama-2-70b --out blis/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.reports.use import export_text
        from tracefit.verbs.export import export as export_verb

        result = export_verb(models, to, out, tables=tables, scope=scope)
        show(result, export_text(result), as_json=json, quiet=quiet)


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
    """Compare two coefficient files, or check an old one on new traces.

    A drift check exits with 0 if the file is still good, with 1 if it has drifted or the new traces cannot tell.

    Example: `tracefit compare models/ new-tables/`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.reports.use import compare_text
        from tracefit.verbs.compare import Tolerance
        from tracefit.verbs.compare import compare as compare_verb

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
    """Refit a coefficient file and confirm each number to 1e-6, or say which input differs.

    Exits with 1 where the file is not confirmed.

    Example: `tracefit verify out/models/beta.json --tables out/tables`
    """
    told = Terminal(quiet=quiet)
    with one_line_errors(told):
        from tracefit.reports.use import verify_text
        from tracefit.verbs.verify import verify as verify_verb

        result = verify_verb(file, tables, features=features, progress=told)
        told.close()
        show(result, verify_text(result), as_json=json, quiet=quiet)
        raise typer.Exit(result.exit_code)


def _server(
    run_config: Path | None,
    model_config: Path | None,
    gpu: str | None,
    tp: int | None,
    settings: list[str] | None,
) -> ServerOptions:
    from tracefit.features.settings import settings_from
    from tracefit.verbs.ingest import ServerOptions, parse_assignments

    given = {**parse_assignments(settings or []), "tensor_parallel": tp}
    return ServerOptions(run_config, model_config, gpu, settings_from(given, where="--set"))


def _kept(keep_attributes: list[str] | None, *, all_spans: bool, show_values: bool) -> IngestOptions:
    from tracefit.verbs.ingest import IngestOptions

    keys = [key.strip() for text in keep_attributes or [] for key in text.split(",")]
    return IngestOptions(all_spans, tuple(key for key in keys if key), show_values)


def main() -> None:
    """Run the command line."""
    keep_little()
    sys.exit(called(app))


if __name__ == "__main__":
    main()
