"""Options, each declared once for Python and the command line: name, type, unit, default, help and flag.

A field made with `option` is an option of its class: the command line takes its name, type and default from the field
and its help from the docstring of the class. An option of a function is an alias such as `DeploymentOption`, the type
of the parameter in both. `OptionFlag` has what only the command line needs, and an environment variable has the flag's
name. Errors, warnings and results write an option with `named`, files with `flag_of`.

Nothing heavy is imported here: the help of a command would wait for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec.structs import replace

from tracefit.errors import UsageError, either

BLOCK_BYTES = 24 << 20
"""Usual size of a block of a trace file; the last one is smaller, a block with a longer record is larger."""

BetaTarget = Literal["auto", "clock", "duration"]
"""Where step times come from."""

Completion = Literal["deployments", "runs", "gpus", "consumers"]


class OptionFlag(msgspec.Struct, frozen=True):
    """How an option is written on the command line.

    Attributes:
        help: The option's help; a field's is in the docstring of its class.
        argument: Name of the parameter in Python; empty for a field, and for an option that only the command line has.
        flag: The flag, if it is not the name with dashes.
        metavar: How help shows the value.
        minimum: The least number allowed.
        maximum: The largest number allowed.
        completion: Names that a shell completes it with.
        kind: Type of the value on the command line, if `cli.arguments` does not derive it from that in Python.
        read: Converts the value from the command line to the field's type.
        positional: Whether the command line takes it by position, without a flag.
    """

    help: str = ""
    argument: str = ""
    flag: str | None = None
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    completion: Completion | None = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    positional: bool = False

    def spelled(self, name: str) -> str:
        """Return the flag of an option with this name."""
        return self.flag or f"--{name.replace('_', '-')}"


_Options = TypeVar("_Options")


def option(default: Any, **how: Any) -> Any:
    """Declare a field of a frozen dataclass as an option; `how` are the fields of `OptionFlag`."""
    return field(default=default, metadata={"flag": OptionFlag(**how)})


def options_of(kind: type) -> dict[str, tuple[OptionFlag, Any]]:
    """Return the options of a class: name to its flag, with help, and its default."""
    texts = _attributes(kind)
    return {
        one.name: (replace(flag, help=texts[one.name]), one.default)
        for one in fields(kind)
        if (flag := one.metadata.get("flag")) is not None
    }


def from_flags(kind: type[_Options], values: Mapping[str, Any], **others: Any) -> _Options:
    """Make an object of a class from values of the command line; one that is not given keeps its default."""
    fields_set = {}
    for name, (flag, _) in options_of(kind).items():
        value = values[name]
        if value is not None and value != []:
            try:
                value = flag.read(value) if flag.read else value
            except UsageError as error:
                raise UsageError(error.what, where=named(kind, name), hint=error.hint) from error
            fields_set[name] = tuple(value) if isinstance(value, list) else value
    return kind(**fields_set | others)


def named(declared: Any, name: str = "") -> str:
    """Name an option in a text for the user: as a parameter in Python, as a flag on the command line.

    Args:
        declared: An alias such as `DeploymentOption`, or a class of options.
        name: The field of the class; a field that is not an option is a parameter in both.
    """
    flag = flag_in(declared, name)
    parameter = f"`{declared.__name__}.{name}`" if name else f"`{flag.argument if flag else ''}`"
    return either(flag_of(declared, name) or parameter, parameter)


def flag_of(declared: Any, name: str = "") -> str | None:
    """Return the flag of an option, for a file, which may be read by others than its maker; see `named`."""
    flag = flag_in(declared, name)
    return flag.spelled(name or flag.argument) if flag and not flag.positional else None


def is_positional(declared: Any) -> bool:
    """Return whether the command line takes an option by its position."""
    flag = flag_in(declared)
    return flag is not None and flag.positional


def flag_in(declared: Any, name: str = "") -> OptionFlag | None:
    """Return how the command line writes an option, or a field of a class of options; null if it does not."""
    if name:
        return cast("OptionFlag | None", declared.__dataclass_fields__[name].metadata.get("flag"))
    return next((one for one in getattr(declared, "__metadata__", ()) if isinstance(one, OptionFlag)), None)


def _attributes(kind: type) -> dict[str, str]:
    """Read the lines of a docstring's section `Attributes`: name to text, on one line."""
    texts: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2].splitlines():
        if line.startswith("     "):
            texts[name] += f" {line.strip()}"
        else:
            name, _, texts[name] = line.strip().partition(": ")
    return texts


def keys_of(texts: list[str]) -> tuple[str, ...]:
    """Return the keys of an option that takes several, in one text or more."""
    # An environment variable and a configuration file have one text for an option: commas let it name several keys.
    keys = [key.strip() for text in texts for key in text.split(",")]
    return tuple(key for key in keys if key)


# -- options of functions --------------------------------------------------------------------------------

DeploymentOption = Annotated[
    str | None,
    OptionFlag(
        "Deployment id, or a unique part of it; needed if there are several deployments.",
        "deployment",
        completion="deployments",
    ),
]
RunOption = Annotated[
    str | None,
    OptionFlag(
        "A run: chooses the deployment that was trained on it, instead of --deployment.",
        "run",
        metavar="NAME",
        completion="runs",
    ),
]
ReplayedRunOption = Annotated[
    str | None,
    OptionFlag("The run to replay; every run if not given.", "run", metavar="NAME", completion="runs"),
]
WorkersOption = Annotated[
    int | None,
    OptionFlag(
        (
            "Most processes that decode traces and build and read tables; one per core of the machine or cluster if "
            "not given."
        ),
        "workers",
        minimum=1,
    ),
]
TablesOption = Annotated[
    str | Path | None,
    OptionFlag("Tables that the models were trained on; those next to the models if not given.", "tables"),
]
ConsumerVersionOption = Annotated[
    str | None,
    OptionFlag(
        "Version of the consumer, such as 0.9.2, if an older one needs another form; the newest if not given.",
        "consumer_version",
        metavar="VERSION",
    ),
]
BatchOption = Annotated[
    float | None,
    OptionFlag(
        "Decoding requests. For a request: the requests that run when it arrives; if not given, 0 with an empty queue, "
        "else as many as fit into slots and KV blocks.",
        "batch",
        minimum=0,
    ),
]
ContextOption = Annotated[
    float | None, OptionFlag("Mean tokens in the KV cache per request of --batch.", "context", minimum=0)
]
PrefillOption = Annotated[float, OptionFlag("Prompt tokens computed in the step.", "prefill", minimum=0)]
PrefillRequestsOption = Annotated[
    float | None,
    OptionFlag("Requests whose prompt tokens the step computes.", "prefill_reqs", minimum=0),
]
WaitingOption = Annotated[float, OptionFlag("Requests in the queue during the step.", "waiting", minimum=0)]
PromptOption = Annotated[
    float | None,
    OptionFlag("Prompt tokens of a request; predicts the request.", "prompt_tokens", flag="--prompt", minimum=1),
]
OutputOption = Annotated[
    float, OptionFlag("Tokens that the request generates.", "output_tokens", flag="--output", minimum=1)
]
QueueOption = Annotated[float, OptionFlag("Requests that wait ahead of the request.", "queue", minimum=0)]
CachedOption = Annotated[float, OptionFlag("Prompt tokens found in the prefix cache.", "cached", minimum=0)]
FeaturesOption = Annotated[
    list[str] | None,
    OptionFlag(
        "Value of a feature or table column, such as running_depth, the requests that run on arrival; repeatable.",
        "features",
        flag="--feature",
        metavar="NAME=NUMBER",
    ),
]
RateOption = Annotated[float | None, OptionFlag("Requests per second over all servers.", "rate")]
ServerCountOption = Annotated[
    int | None,
    OptionFlag(
        "Number of servers; gives their largest rate, or with --rate their latencies at this rate.",
        "servers",
        minimum=1,
    ),
]
RowsOption = Annotated[Path | None, OptionFlag("A .csv, .parquet or .ndjson file; predicts every row.", "rows")]
PriceOption = Annotated[
    float | Mapping[str, float] | None,
    OptionFlag(
        (
            "Price of a GPU per hour, or of each, such as H200=3.5 (repeatable): the cost of a server and of a million "
            "tokens."
        ),
        "price",
        metavar="PRICE|GPU=PRICE",
    ),
]
TryOption = Annotated[
    Mapping[str, Iterable[str]] | None,
    OptionFlag(
        (
            "Servers to compute and to choose from: gpu=H100,H200 and tp=1,2,4 (repeatable), by a transfer from OUT, "
            "or from the law in the package."
        ),
        "tries",
        flag="--try",
        metavar="NAME=VALUES",
    ),
]
TriedModelOption = Annotated[
    str | Path | None, OptionFlag("The model's config.json, for --try.", "model_config", metavar="FILE")
]
TriedForceOption = Annotated[
    bool, OptionFlag("With --try, also answer where nothing shows how exact the answer is.", "force")
]
FigureOption = Annotated[
    str | Path | None,
    OptionFlag(
        "Page to write, with a figure of latencies over the rate.",
        "figure",
        metavar="PAGE.html",
        kind=Path | None,
    ),
]
ObjectivesOption = Annotated[
    list[str] | None,
    OptionFlag(
        "Longest time allowed for a percentile of ttft, itl or e2e, such as ttft_p99=500; repeatable.",
        "slo_ms",
        flag="--slo",
        metavar="LATENCY_PQ=MS",
    ),
]
LimitsOption = Annotated[
    list[str] | None,
    OptionFlag(
        "Longest time that ttft, itl or e2e should take: gives lines in the figures and the goodput; repeatable.",
        "slo_ms",
        flag="--slo",
        metavar="LATENCY=MS",
    ),
]
ChangesOption = Annotated[
    list[str] | None,
    OptionFlag(
        "A setting of the scheduler to change, such as max_num_batched_tokens=8192; repeatable.",
        "settings",
        flag="--set",
        metavar="KEY=VALUE",
    ),
]


PathsArgument = Annotated[
    str | Path | Iterable[str | Path],
    OptionFlag(
        "Run folders, folders of run folders, trace files (files without a run configuration next to them form "
        "one run), patterns, s3:// or gs:// URLs, or - for standard input.",
        "paths",
        positional=True,
    ),
]
InspectedArgument = Annotated[
    str | Path | Iterable[str | Path],
    OptionFlag(
        "Run folders, folders of run folders, or trace files; or one folder that run or ingest wrote.",
        "paths",
        positional=True,
    ),
]
TablesArgument = Annotated[str | Path, OptionFlag("A folder that ingest or run wrote.", "tables", positional=True)]
_MODELS = "A coefficient file, a folder of them, or a folder that run wrote."
ModelsArgument = Annotated[str | Path, OptionFlag(_MODELS, "models", positional=True)]
FirstArgument = Annotated[str | Path, OptionFlag(_MODELS, "first", positional=True)]
SecondArgument = Annotated[
    str | Path,
    OptionFlag(
        (
            "Another such file or folder; tables of new runs, for a drift check; or points of a benchmark, to put "
            "predictions beside them."
        ),
        "second",
        positional=True,
    ),
]
VerifiedArgument = Annotated[str | Path, OptionFlag(_MODELS, "file", positional=True)]
ReportedArgument = Annotated[
    str | Path,
    OptionFlag("A folder that run or train wrote, with evaluation.json and the models.", "folder", positional=True),
]
ReplayedArgument = Annotated[
    str | Path,
    OptionFlag("Folder that `tracefit run` wrote.", "folder", metavar="OUT", kind=Path, positional=True),
]
PlannedArgument = Annotated[
    str | Path | Iterable[str | Path] | None,
    OptionFlag(
        (
            "Folders that `tracefit run` or `transfer` wrote, or folders of coefficient files; each deployment in them "
            "is a kind of server."
        ),
        "folders",
        metavar="OUT...",
        positional=True,
    ),
]
SourcesArgument = Annotated[
    str | Path | Iterable[str | Path] | None,
    OptionFlag(
        "Folders that `tracefit run` wrote, of the servers to learn from; the law in the package if none is given.",
        "folders",
        metavar="OUT...",
        positional=True,
    ),
]
LawEngineOption = Annotated[
    str | None,
    OptionFlag("Engine of the new server, for the law in the package: vllm if not given.", "engine"),
]
CalibrateOption = Annotated[
    str | Path | None,
    OptionFlag(
        (
            "Some minutes of traces of the new server, points of a benchmark of it, or a folder that run wrote of "
            "these: draws the law to them."
        ),
        "calibrate",
        metavar="TRACES|OUT",
    ),
]
ForceOption = Annotated[
    bool,
    OptionFlag("Answer where nothing shows how exact the answer is, with the widest interval.", "force"),
]
PredictingArgument = Annotated[
    list[Path],
    OptionFlag("Coefficient files, or a folder that train or run wrote.", "models", positional=True),
]
FeatureSetsArgument = Annotated[
    list[str] | None,
    OptionFlag("Built-in sets or files; every built-in set if none is named.", positional=True),
]
ConsumerOption = Annotated[
    str,
    OptionFlag(
        "The consumer, such as blis, dynamo-mocker or csv; an unknown name lists all of them.",
        "to",
        completion="consumers",
    ),
]
RunOutOption = Annotated[
    str | Path, OptionFlag("Folder or s3:// or gs:// URL for tables, models, evaluation and report.", "out")
]
IngestOutOption = Annotated[str | Path, OptionFlag("The tables folder, or its s3:// or gs:// URL.", "out")]
TrainOutOption = Annotated[
    str | Path,
    OptionFlag("Folder or s3:// or gs:// URL for the models, the evaluation and the report.", "out"),
]
TransferOutOption = Annotated[
    str | Path,
    OptionFlag("Folder for the models of the new server, the evaluation and the report.", "out"),
]
ReportOutOption = Annotated[str | Path | None, OptionFlag("Folder to write to; FOLDER if not given.", "out")]
RowsOutOption = Annotated[
    str | Path | None,
    OptionFlag(
        "File for the predicted rows, in the format of its suffix; CSV on stdout if not given.",
        "out",
        kind=Path | None,
    ),
]
ExportOutOption = Annotated[str | Path, OptionFlag("Folder for the consumer's files.", "out")]
DryRunOption = Annotated[bool, OptionFlag("List the files that would be read, and their formats; write nothing.")]
FeaturesFileOption = Annotated[
    str | Path | None,
    OptionFlag("Where the feature-set file is now, if it moved.", "features", kind=Path | None),
]
RowKindOption = Annotated[
    str, OptionFlag("Kind of the rows: step, request, or the name of a model whose features they have.", "of")
]
EachOption = Annotated[
    bool, OptionFlag("Print one line per request, in seconds and with vLLM's names, as CSV or JSON.")
]
CsvOption = Annotated[bool, OptionFlag("Print CSV on stdout, with times in seconds.")]


# -- classes of options ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Facts about the server that the user states, in addition to the run's files or instead of them.

    Attributes:
        run_config: exp-config.yaml or run.yaml, a `vllm serve` command line, or a server log, for every run.
        model_config: The model's config.json, for every run.
        gpu: GPU name, such as H100, or a JSON file that describes one.
        tp: Tensor-parallel ranks.
        settings: Any server setting, such as max_num_seqs=128; repeatable.
    """

    run_config: Path | None = option(None)
    model_config: Path | None = option(None)
    gpu: str | None = option(None, completion="gpus")
    tp: int | None = option(None, minimum=1)
    settings: Mapping[str, object] | None = option(None, flag="--set", metavar="KEY=VALUE")


class BuildLimits(msgspec.Struct, frozen=True):
    """How much of a run is in memory while its tables are built.

    Attributes:
        window_bytes: Bytes on disk of the staged parts that are read at once; in memory they take several
            times as much.
        sorted_bytes: Bytes of rows that wait to be sorted; more rows go to disk.
        small_run_rows: The tables of a run with at most so many steps, journey events and snapshots stay in memory
            until they are written, and its timeline is built from them. `train` builds the timeline of a larger run,
            in more memory: about 1 KiB for each step.
    """

    window_bytes: int = 8 << 20
    sorted_bytes: int = 48 << 20
    small_run_rows: int = 100_000


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Bounds on reading, and which parts of the traces are kept; private text of users only on request.

    Attributes:
        all_spans: Keep spans of other services and scopes too, in the spans table only.
        keep_attributes: Span attributes to keep in addition to ids, counts, routes, the model and sampling parameters;
            repeatable.
        show_values: Show the content of rejected records, which is private data, not only their structure.
        max_document_mib: Longest JSON document, line or protobuf message that is read, in MiB; memory holds it as a
            whole.
        max_rejects: Number of bad records after which the rest of a file is not read.
        block_bytes: Bytes of a file that are decoded at once; larger blocks need more memory per worker.
        bytes_per_worker: Bytes for which another process starts; the start takes about as long as decoding 64 MiB.
        fetched_bytes: Most bytes of files from buckets on disk at a time, unless one file is larger.
        build: How much of a run is in memory while its tables are built.
    """

    all_spans: bool = option(default=False)
    keep_attributes: tuple[str, ...] = option((), metavar="KEY,...", read=keys_of)
    show_values: bool = option(default=False)
    max_document_mib: int = option(256, flag="--max-document", minimum=1, metavar="MIB")
    max_rejects: int = option(100_000, minimum=1)
    block_bytes: int = BLOCK_BYTES
    bytes_per_worker: int = 64 << 20
    fetched_bytes: int = 1 << 30
    build: BuildLimits = field(default_factory=BuildLimits)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Where traces are decoded and tables are built and read.

    Attributes:
        name: Where the work runs: in processes on this machine, or on Ray (`pip install 'tracefit[ray]'`).
        ray_address: The Ray cluster: auto for the one on this machine, ray://HOST:PORT or HOST:PORT; a new one starts
            here if not given.
    """

    name: Literal["local", "ray"] = option("local", flag="--engine")
    ray_address: str | None = option(None, metavar="ADDRESS")


LOCAL = EngineChoice()


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train.

    Attributes:
        beta_target: Source of step times: the step clock, step.duration_us, or auto, which takes durations if they
            cover the busy time.
        features: Feature set for step times: batch, power, roofline, roofline_max, work_max, line, line+sizes, law, a
            YAML or JSON file, or auto, which chooses by validation inside and beyond the training load.
        sample_csv: Also write the two sample tables of the specification.
        positive: Allow no negative coefficient and no negative intercept.
        any_sign: Allow coefficients of any sign, even a negative time per token, request or byte.
        fast: Skip the gradient-boosted references and the replays of other rates.
        include_overloaded: Train on overloaded runs even if their deployment has other runs.
        across: Also measure how well every run, model and GPU in turn is predicted by models fitted on the others, and
            likewise every deployment if several have the same model and GPU.
        thresholds: Limits of a verdict, such as simulation.step_mape_pct=12:30 for yes up to 12 and with limits up to
            30; repeatable.
    """

    beta_target: BetaTarget = option("auto")
    features: str = option("auto")
    sample_csv: bool = option(default=False)
    positive: bool = option(default=False)
    any_sign: bool = option(default=False)
    fast: bool = option(default=False)
    include_overloaded: bool = option(default=False)
    across: bool = option(default=False)
    thresholds: tuple[str, ...] = option((), flag="--threshold", metavar="USE.MEASURE=YES:WITH_LIMITS")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The requests of a plan.

    Attributes:
        prompt: Prompt tokens of every request; as traced if not given.
        output: Tokens that every request generates; as traced if not given.
        burstiness: Shape of the gamma distribution of gaps between arrivals: 1 is Poisson, below 1 gives bursts; found
            in the recording if not given.
        router: Whether servers get requests at random or in turn.
        file: A .csv, .parquet or .ndjson file of requests, with prompt_tokens and output_tokens, and if known
            cached_tokens and arrival_s.
        arrivals: `poisson`, requests that come at random at a steady rate; they have gamma distributed gaps if the
            recorded ones, within stretches of steady rate, differ from that beyond chance. `traced`, the gaps of the
            recording over the mean of their stretch. A file of requests with times and lengths (a log of a client, a
            table of `requests`, a CSV file) or of rates per hour plans the servers for these, window by window.
        accept: Tokens that a request gets from a step, with speculative decoding; as recorded if not given. Step times
            stay those of the recording, with its drafts.
        prefix_hits: Share of the prompt tokens that is in the prefix cache: `traced`, as each recorded request had it;
            `none`; or a number, in percent.
    """

    prompt: int | None = option(None, minimum=1)
    output: int | None = option(None, minimum=1)
    burstiness: float | None = option(None, metavar="SHAPE")
    router: Literal["random", "round_robin"] = option("random")
    file: str | Path | None = option(None, flag="--load", kind=Path | None)
    arrivals: str = option("poisson", metavar="poisson|traced|FILE")
    accept: float | None = option(None, metavar="TOKENS")
    prefix_hits: str = option("traced", metavar="traced|none|PERCENT")


@dataclass(frozen=True, slots=True)
class DayOptions:
    """How a plan for a file of arrivals is made.

    Attributes:
        window_s: With a file of arrivals: length of the windows in which the objectives hold, in s.
        scale_up_s: With a file of arrivals: time from asking for a server to its first request, in s, for a scaler.
        scale_step: With a file of arrivals: servers that a scaler adds or removes at once.
    """

    window_s: float = option(3600.0, minimum=1)
    scale_up_s: float = option(300.0, minimum=0)
    scale_step: int = option(1, minimum=1)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much worse an old file may be on new traces.

    Attributes:
        factor: Drift check: multiple of the published error that is still good.
        slack_pct: Drift check: percentage points above the published error that are still good.
    """

    factor: float = option(1.5, flag="--tolerance", minimum=1)
    slack_pct: float = option(2.0, flag="--slack", minimum=0)
