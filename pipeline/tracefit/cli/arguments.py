"""Arguments and options that several commands share, each with its help, and their conversion for the library."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from tracefit.console import warn

if TYPE_CHECKING:
    from tracefit.commands.ingest import IngestOptions, ServerOptions
    from tracefit.commands.train import TrainOptions


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
    typer.Option(help="Scope id, or a part of it that is unique; needed where there are several scopes."),
]
RunName = Annotated[
    Optional[str], typer.Option("--run", metavar="NAME", help="A run of the scope, in place of --scope.")
]
TablesFolder = Annotated[str, typer.Argument(help="A folder that ingest or run wrote.")]
ModelFiles = Annotated[
    str, typer.Argument(help="A coefficient file, a folder of them, or a folder that run wrote.")
]
AllSpans = Annotated[
    bool, typer.Option("--all-spans", help="Keep spans of other services too, in the spans table only.")
]
KeepAttributes = Annotated[
    Optional[list[str]],
    typer.Option(
        metavar="KEY,...",
        help="Span attributes to keep in addition to ids, counts, routes, the model and sampling parameters; "
        "repeatable.",
    ),
]
ShowValues = Annotated[
    bool,
    typer.Option(
        "--show-values",
        help="Show the content of rejected records, not only their structure; it is private data.",
    ),
]
MaxDocument = Annotated[
    int,
    typer.Option(
        min=1, metavar="MIB", help="Longest JSON document, line or protobuf message that is read, in MiB."
    ),
]
MaxRejects = Annotated[
    int, typer.Option(min=1, help="Bad records after which the rest of a file is not read.")
]
Workers = Annotated[
    Optional[int],
    typer.Option(
        min=1,
        help="Most processes that decode traces, build tables and read them; the number of cores, or of a cluster's, if not given.",
    ),
]
EngineName = Annotated[
    Literal["local", "ray"],
    typer.Option(
        help="Where they run: as processes of this machine, or on Ray (`pip install 'tracefit[ray]'`)."
    ),
]
RayAddress = Annotated[
    Optional[str],
    typer.Option(
        metavar="ADDRESS",
        help="The Ray cluster: auto for that of this machine, ray://HOST:PORT or HOST:PORT; started here if not given.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
BetaTarget = Annotated[
    Literal["auto", "clock", "duration"],
    typer.Option(
        help="Source of step times: the step clock, step.duration_us, or auto for durations where they cover the "
        "busy time."
    ),
]
Features = Annotated[
    str,
    typer.Option(
        help="Feature set for step times: batch, roofline, roofline_max, work_max, a YAML or JSON file, or auto to let "
        "validation inside and beyond the training load choose."
    ),
]
Thresholds = Annotated[
    Optional[list[str]],
    typer.Option(
        "--threshold",
        metavar="USE.MEASURE=YES:WITH_LIMITS",
        help="What a use requires of the models, such as simulation.step_mape_pct=12:30; repeatable.",
    ),
]
SampleCsv = Annotated[
    bool, typer.Option("--sample-csv", help="Also write the specification's two sample tables.")
]
Positive = Annotated[
    bool, typer.Option("--positive", help="Allow no negative coefficient and no negative intercept.")
]
AnySign = Annotated[
    bool,
    typer.Option(
        "--any-sign",
        help="Allow coefficients of any sign, even a negative time per token, request or byte.",
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast", help="Skip the gradient-boosted references, which take most of the training time."
    ),
]
IncludeOverloaded = Annotated[
    bool,
    typer.Option("--include-overloaded", help="Train on overloaded runs too, where their scope has others."),
]
Across = Annotated[
    bool,
    typer.Option(
        "--across",
        help="Also leave out every run, model and GPU in turn, and measure models fitted on the others.",
    ),
]


def server_options(
    run_config: Path | None,
    model_config: Path | None,
    gpu: str | None,
    tp: int | None,
    settings: list[str] | None,
) -> ServerOptions:
    """Collect the options that describe the servers behind the traces."""
    from tracefit.commands.ingest import ServerOptions, parse_assignments
    from tracefit.server.settings import SETTINGS, canonical_name, settings_from

    given = {**parse_assignments(settings or []), "tensor_parallel": tp}
    # A misspelt setting is refused by `parse_assignments`; one of a newer vLLM, which is not in the list yet, has to pass.
    for key in given:
        if canonical_name(key) not in SETTINGS:
            warn(
                f"--set {key}: no setting of this name is known; it is recorded and tells scopes apart, but no model uses it"
            )
    return ServerOptions(run_config, model_config, gpu, settings_from(given, where="--set"))


def keys_of(texts: list[str] | None) -> tuple[str, ...]:
    """Return the keys of attributes in the values of an option; several may stand in one, comma separated."""
    # Environment and configuration file hold one text for an option; commas let it name several keys there.
    keys = [key.strip() for text in texts or [] for key in text.split(",")]
    return tuple(key for key in keys if key)


def ingest_options(context: typer.Context) -> IngestOptions:
    """Collect the options that bound reading and choose which part of the traces is kept."""
    from tracefit.commands.ingest import IngestOptions

    given = context.params
    return IngestOptions(
        all_spans=given["all_spans"],
        keep_attributes=keys_of(given["keep_attributes"]),
        show_values=given["show_values"],
        max_document=given["max_document"] << 20,
        max_rejects=given["max_rejects"],
    )


def train_options(context: typer.Context) -> TrainOptions:
    """Collect the training options: `run` and `train` take every option under its name in TrainOptions."""
    from tracefit.coefficients.verdicts import override
    from tracefit.commands.train import TrainOptions

    # An option that is missing here is a KeyError in every run: none can be forgotten silently.
    given = {field.name: context.params[field.name] for field in dataclasses.fields(TrainOptions)}
    given["thresholds"] = override(given["thresholds"] or [])
    return TrainOptions(**given)
