"""Arguments of several commands, groups of options with their help, and their conversion for the library.

Options that belong together are a group (`SERVER`, `INGEST`, ...), which a command takes as a whole, and a function makes of its
values what the library expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from tracefit.console import warn

if TYPE_CHECKING:
    from tracefit.commands.ingest import ServerOptions
    from tracefit.commands.plan import LoadOptions
    from tracefit.commands.train import TrainOptions
    from tracefit.receive.options import ReceiveOptions
    from tracefit.tables.options import IngestOptions


Paths = Annotated[
    list[str],  # not Path, which would make one slash of the two in a URL
    typer.Argument(
        help="Run folders, folders of run folders, trace files (files without a run configuration beside them form "
        "one run), patterns, s3:// or gs:// URLs, or - for standard input."
    ),
]
InspectPaths = Annotated[
    list[str],
    typer.Argument(
        help="Run folders, folders of run folders, or trace files; or one folder that run or ingest wrote."
    ),
]


# -- completion in a shell --------------------------------------------------------------------------------


def _folders(context: typer.Context) -> list[str]:
    """Return what the command line names so far and is there: a completion's arguments are not yet bound to parameters."""
    named = [*context.args, *(v for v in context.params.values() if isinstance(v, str))]
    return [one for one in named if Path(one).exists()]


def _scope_ids(context: typer.Context, incomplete: str) -> list[str]:
    from tracefit.coefficients.models import load
    from tracefit.errors import TracefitError

    with suppress(TracefitError):
        return [s for folder in _folders(context) for s in load(folder).scope_ids if s.startswith(incomplete)]
    return []


def _run_ids(context: typer.Context, incomplete: str) -> list[str]:
    from tracefit.commands.locate import scan
    from tracefit.errors import TracefitError

    with suppress(TracefitError):
        runs = [scan(folder, "runs").select("run_id").unique().collect() for folder in _folders(context)]
        return sorted(r for frame in runs for r in frame["run_id"] if r.startswith(incomplete))
    return []


def _gpu_names(incomplete: str) -> list[str]:
    from tracefit.server.hardware import CATALOGUE

    return [gpu.name for gpu in CATALOGUE.values() if gpu.name.startswith(incomplete)]


ScopeName = Annotated[
    Optional[str],
    typer.Option(
        help="Scope id, or a part of it that is unique; needed where there are several scopes.",
        autocompletion=_scope_ids,
    ),
]
RunName = Annotated[
    Optional[str],
    typer.Option(
        "--run", metavar="NAME", help="A run of the scope, in place of --scope.", autocompletion=_run_ids
    ),
]
TablesFolder = Annotated[str, typer.Argument(help="A folder that ingest or run wrote.")]
ModelFiles = Annotated[
    str, typer.Argument(help="A coefficient file, a folder of them, or a folder that run wrote.")
]
# -- groups of options ----------------------------------------------------------------------------------

Group = Mapping[str, tuple[Any, Any]]
"""Name of each option, as the library has it, to what typer reads and its default."""


def _option(kind: Any, default: Any, *flags: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*flags, **settings)], default


SERVER: Group = {
    "run_config": _option(
        Optional[Path],
        None,
        help="exp-config.yaml or run.yaml, a `vllm serve` command line, or a server log, for every run.",
    ),
    "model_config": _option(Optional[Path], None, help="The model's config.json, for every run."),
    "gpu": _option(
        Optional[str],
        None,
        help="GPU name, such as H100, or a JSON file that describes one.",
        autocompletion=_gpu_names,
    ),
    "tp": _option(Optional[int], None, "--tp", min=1, help="Tensor-parallel ranks."),
    "settings": _option(
        Optional[list[str]],
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Any server setting, such as max_num_seqs=128; repeatable.",
    ),
}
"""Facts about the servers behind the traces, where their files do not state them; read by `server_options`."""

_KEPT: Group = {
    "all_spans": _option(
        bool, False, "--all-spans", help="Keep spans of other services too, in the spans table only."
    ),
    "keep_attributes": _option(
        Optional[list[str]],
        None,
        metavar="KEY,...",
        help="Span attributes to keep in addition to ids, counts, routes, the model and sampling parameters; "
        "repeatable.",
    ),
}

INGEST: Group = {
    **_KEPT,
    "show_values": _option(
        bool,
        False,
        "--show-values",
        help="Show the content of rejected records, not only their structure; it is private data.",
    ),
    "max_document_mib": _option(
        int,
        256,
        "--max-document",
        min=1,
        metavar="MIB",
        help="Longest JSON document, line or protobuf message that is read, in MiB.",
    ),
    "max_rejects": _option(
        int, 100_000, min=1, help="Bad records after which the rest of a file is not read."
    ),
}
"""Options of reading traces and of the part that is kept; `ingest_options` reads them."""

ENGINE: Group = {
    "workers": _option(
        Optional[int],
        None,
        min=1,
        help="Most processes that decode traces, build tables and read them; the number of cores, or of a cluster's, if not given.",
    ),
    "engine": _option(
        Literal["local", "ray"],
        "local",
        help="Where they run: as processes of this machine, or on Ray (`pip install 'tracefit[ray]'`).",
    ),
    "ray_address": _option(
        Optional[str],
        None,
        metavar="ADDRESS",
        help="The Ray cluster: auto for that of this machine, ray://HOST:PORT or HOST:PORT; started here if not given.",
    ),
}
"""Where traces are decoded and tables read; `workers` and `engine_options` go to the library."""

TRAIN: Group = {
    "beta_target": _option(
        Literal["auto", "clock", "duration"],
        "auto",
        help="Source of step times: the step clock, step.duration_us, or auto for durations where they cover the "
        "busy time.",
    ),
    "features": _option(
        str,
        "auto",
        help="Feature set for step times: batch, roofline, roofline_max, work_max, line, line+sizes, a YAML or JSON file, or auto to let "
        "validation inside and beyond the training load choose.",
    ),
    "sample_csv": _option(
        bool, False, "--sample-csv", help="Also write the specification's two sample tables."
    ),
    "positive": _option(
        bool, False, "--positive", help="Allow no negative coefficient and no negative intercept."
    ),
    "any_sign": _option(
        bool,
        False,
        "--any-sign",
        help="Allow coefficients of any sign, even a negative time per token, request or byte.",
    ),
    "fast": _option(
        bool,
        False,
        "--fast",
        help="Skip the gradient-boosted references, which take most of the training time.",
    ),
    "include_overloaded": _option(
        bool,
        False,
        "--include-overloaded",
        help="Train on overloaded runs too, where their scope has others.",
    ),
    "across": _option(
        bool,
        False,
        "--across",
        help="Also leave out every run, model and GPU, and every scope of several of a model on a GPU, in turn, and measure models fitted on the others.",
    ),
    "thresholds": _option(
        Optional[list[str]],
        None,
        "--threshold",
        metavar="USE.MEASURE=YES:WITH_LIMITS",
        help="A requirement of a use, such as simulation.step_mape_pct=12:30; repeatable.",
    ),
}
"""How models are fitted: each under its name in `TrainOptions`; read by `train_options`."""


RECEIVE: Group = {
    "host": _option(
        str, "127.0.0.1", help="Address to listen on; any that is not loopback needs TLS or --insecure."
    ),
    "grpc_port": _option(int, 4317, min=0, max=65535, help="Port of OTLP/gRPC; 0 takes a free one."),
    "http_port": _option(int, 4318, min=0, max=65535, help="Port of OTLP/HTTP; 0 takes a free one."),
    "tls_cert": _option(Optional[Path], None, help="Certificate chain, PEM; goes with --tls-key."),
    "tls_key": _option(Optional[Path], None, help="Private key of the certificate, PEM."),
    "insecure": _option(
        bool,
        False,
        "--insecure",
        help="Listen beyond this machine without TLS, or read ForwardPassMetrics from there.",
    ),
    "token_file": _option(
        Optional[Path],
        None,
        help="File with the token that senders present as `authorization: Bearer TOKEN`.",
    ),
    "forward_pass_metrics": _option(
        Optional[list[str]],
        None,
        "--forward-pass-metrics",
        metavar="tcp://HOST:PORT",
        help="Also record ForwardPassMetrics from this ZMQ publisher; repeatable. One beyond this machine needs --insecure.",
    ),
    "rotation": _option(
        str,
        "64MiB,5min",
        "--rotate",
        metavar="SIZE,TIME",
        help="Begin a new file at this size, or after this time.",
    ),
    "metrics": _option(
        bool, False, "--metrics", help="Answer GET /metrics on the HTTP port, for Prometheus."
    ),
    "stop_after_s": _option(
        Optional[str],
        None,
        "--stop-after",
        metavar="TIME",
        help="Stop by itself after this time, such as 10min; else on SIGTERM.",
    ),
    **_KEPT,
}
"""Where to listen, and what is kept of what comes in; read by `receive_options`."""

DESCRIPTION: Group = {
    "batch": _option(
        Optional[float],
        None,
        min=0,
        help="Requests that decode. For a request: those that run when it arrives; if not given, none with an empty queue, "
        "else as many as slots and KV blocks hold.",
    ),
    "context": _option(
        Optional[float], None, min=0, help="Mean tokens in the caches of the requests of --batch."
    ),
    "prefill": _option(float, 0, min=0, help="Prompt tokens computed in the step."),
    "prefill_reqs": _option(
        Optional[float], None, min=0, help="Requests that the prompt tokens of the step belong to."
    ),
    "waiting": _option(float, 0, min=0, help="Requests in the queue during the step."),
    "prompt": _option(Optional[float], None, min=1, help="Prompt tokens of a request: predicts the request."),
    "output": _option(float, 1, min=1, help="Tokens the request generates."),
    "queue": _option(float, 0, min=0, help="Requests waiting ahead of it."),
    "cached": _option(float, 0, min=0, help="Prompt tokens found in the prefix cache."),
    "feature": _option(
        Optional[list[str]],
        None,
        metavar="NAME=NUMBER",
        help="A feature or table column as it is, such as running_depth, the requests that run when it arrives; "
        "repeatable.",
    ),
}
"""The step or the request to predict."""

PLAN: Group = {
    "rate": _option(Optional[float], None, help="Requests per second over all servers."),
    "servers": _option(
        Optional[int],
        None,
        min=1,
        help="Number of servers: gives the largest rate, or with --rate what they do at it.",
    ),
    "slo": _option(
        Optional[list[str]],
        None,
        "--slo",
        metavar="LATENCY_PQ=MS",
        help="The longest that a percentile of ttft, itl or e2e may be, such as ttft_p99=500; repeatable.",
    ),
    "settings": _option(
        Optional[list[str]],
        None,
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the scheduler to change, such as max_num_batched_tokens=8192; repeatable.",
    ),
    "price": _option(
        Optional[float], None, min=0, help="Price of a GPU for an hour: gives the cost of a million tokens."
    ),
    "figure": _option(
        Optional[Path],
        None,
        metavar="PAGE.html",
        help="Page to write with a figure of latencies over the rate.",
    ),
    "prompt": _option(
        Optional[int], None, min=1, help="Prompt tokens of every request; as traced if not given."
    ),
    "output": _option(Optional[int], None, min=1, help="Tokens each generates; as traced if not given."),
    "burstiness": _option(
        Optional[float],
        None,
        metavar="SHAPE",
        help="Shape of the gamma distribution of gaps between arrivals: 1 is Poisson, less comes in bursts; as traced "
        "if not given.",
    ),
    "router": _option(
        Literal["random", "round_robin"], "random", help="Whether servers get requests at random or in turn."
    ),
    "file": _option(
        Optional[Path],
        None,
        "--load",
        help="A .csv, .parquet or .ndjson file of requests: prompt_tokens, output_tokens, and cached_tokens and arrival_s "
        "if known.",
    ),
}
"""The load to plan for, and its servers; `load_options` reads the requests."""

SYNTH: Group = {
    "name": _option(str, "synth-run", help="Name of the run folder."),
    "seed": _option(int, 0, min=0, help="Seed of every draw."),
    "law": _option(
        Literal["linear", "roofline"], "linear", help="Step-time law; its coefficients are in truth.json."
    ),
    "model": _option(str, "llama-8b", help="Model preset, such as llama-8b."),
    "gpu": _option(str, "H100", help="GPU preset, such as H100."),
    "tp": _option(int, 1, min=1, help="Tensor-parallel ranks."),
    "requests": _option(int, 300, min=1, help="Requests per server."),
    "rate_per_s": _option(float, 14.0, "--rate", help="Mean arrivals per second."),
    "surge": _option(
        Optional[float],
        None,
        help="Factor on the arrivals in the last 30 % of the time, steady before; light, burst and heavy load if not "
        "given.",
    ),
    "num_blocks": _option(
        int, 4097, "--blocks", min=2, help="KV blocks; few of them cause a queue and preemptions."
    ),
    "noise": _option(float, 0.03, min=0, help="Sigma of the log-normal factor on a step's time."),
    "form": _option(
        Literal[
            "instrumented", "stock", "fpm", "log", "log_seconds", "sglang", "request_log", "bench", "guidellm"
        ],
        "instrumented",
        help=(
            "Spans of the instrumented server; of an unmodified vLLM, one per request, none of steps; "
            "ForwardPassMetrics, or the iterations in vLLM's log, in microseconds or whole seconds: one record for each step, "
            "none of requests; SGLang's spans; the engine's times of each request; or the log of a load generator, "
            "`vllm bench serve` with the time of every token, or GuideLLM with those of the first and the last."
        ),
    ),
    "step_sampling": _option(float, 1.0, min=0, max=1, help="Share of steps traced."),
    "rich_sampling": _option(float, 0.0, min=0, max=1, help="Share of traced steps with request snapshots."),
    "journey_sampling": _option(
        float, 1.0, min=0, max=1, help="Share of requests traced; of stock spans by trace id."
    ),
    "duration": _option(
        Literal["schedule", "step"],
        "schedule",
        help="Meaning of step.duration_us: time in schedule(), or the step's time.",
    ),
    "queued_stamp": _option(
        Literal["step_start", "arrival"],
        "step_start",
        help="QUEUED at the step start after the API work, or at the end of that work itself.",
    ),
}
"""Options of a generated run, by their names in `SynthOptions`, except `surge`, which stands for phases of the load."""

OUTPUT: Group = {
    "json": _option(bool, False, "--json", help="Print a machine-readable summary on stdout."),
    "quiet": _option(bool, False, "--quiet", "-q", help="Print errors only."),
}
"""How a command shows its result: the last options of every command."""


# -- their values for the library -----------------------------------------------------------------------


def server_options(options: Mapping[str, Any], *settings: str) -> ServerOptions:
    """Collect the options that describe the servers behind the traces; `settings` come before those of the user."""
    from tracefit.commands.ingest import ServerOptions, parse_assignments
    from tracefit.server.settings import SETTINGS, canonical_name, settings_from

    assigned = parse_assignments([*settings, *(options["settings"] or [])])
    given = {**assigned, "tensor_parallel": options["tp"]}
    # A misspelt setting is refused by `parse_assignments`; one of a newer vLLM, which is not in the list yet, has to pass.
    for key in given:
        if canonical_name(key) not in SETTINGS:
            warn(
                f"--set {key}: no setting of this name is known; it is recorded and tells scopes apart, but no model uses it"
            )
    return ServerOptions(
        options["run_config"], options["model_config"], options["gpu"], settings_from(given, where="--set")
    )


def _keys_of(texts: list[str] | None) -> tuple[str, ...]:
    # Environment and configuration file hold one text for an option; commas let it name several keys there.
    keys = [key.strip() for text in texts or [] for key in text.split(",")]
    return tuple(key for key in keys if key)


def ingest_options(options: Mapping[str, Any]) -> IngestOptions:
    """Collect the options that bound reading and choose which part of the traces is kept."""
    from tracefit.tables.options import IngestOptions

    given = {name: options[name] for name in INGEST}
    given["keep_attributes"] = _keys_of(given["keep_attributes"])
    return IngestOptions(**given)


def load_options(options: Mapping[str, Any]) -> LoadOptions:
    """Collect the lengths and the arrivals of the requests to plan for."""
    from tracefit.commands.plan import LoadOptions

    return LoadOptions(
        **{name: options[name] for name in ("prompt", "output", "burstiness", "router", "file")}
    )


def receive_options(options: Mapping[str, Any]) -> ReceiveOptions:
    """Collect where to listen, and what is kept of what comes in."""
    from tracefit.receive.options import ReceiveOptions, parse_duration, parse_rotation

    given = {name: options[name] for name in RECEIVE}
    given["forward_pass_metrics"] = tuple(given["forward_pass_metrics"] or ())
    given["rotation"] = parse_rotation(given["rotation"])
    given["keep_attributes"] = _keys_of(given["keep_attributes"])
    after = given["stop_after_s"]
    given["stop_after_s"] = parse_duration(after, option="--stop-after") if after else None
    return ReceiveOptions(**given)


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Collect where traces are decoded, as the arguments of a command of the library."""
    from tracefit.engines.local import EngineChoice

    return {"workers": options["workers"], "engine": EngineChoice(options["engine"], options["ray_address"])}


def train_options(options: Mapping[str, Any]) -> TrainOptions:
    """Collect how models are fitted."""
    from tracefit.coefficients.verdicts import override
    from tracefit.commands.train import TrainOptions

    # By the names of the group: one that `TrainOptions` does not have is an error in every run, none is forgotten silently.
    given = {name: options[name] for name in TRAIN}
    return TrainOptions(**given | {"thresholds": override(given["thresholds"] or [])})
