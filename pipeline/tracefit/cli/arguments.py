"""Arguments and options that several commands share, each with its help, and what the library makes of them."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from tracefit.commands.ingest import IngestOptions, ServerOptions
    from tracefit.commands.train import TrainOptions


class BetaTarget(StrEnum):
    """Which step time to fit."""

    auto = "auto"
    clock = "clock"
    duration = "duration"


Paths = Annotated[
    list[str],  # not Path, which would make one slash of the two in a URL
    typer.Argument(
        help="Run folders, folders of run folders, trace files (those beside no run configuration make one run "
        "together), patterns, s3:// or gs:// URLs, or - for standard input."
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
MaxDocument = Annotated[
    int,
    typer.Option(
        min=1, metavar="MIB", help="Longest JSON document, line or protobuf message that is read, in MiB."
    ),
]
MaxRejects = Annotated[
    int, typer.Option(min=1, help="Bad records of a file after which the rest of it is not read.")
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
        help="Feature set for step times: batch, roofline, roofline_max, work_max, a YAML or JSON file, or auto: validation "
        "inside and beyond the training load chooses."
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
AnySign = Annotated[
    bool,
    typer.Option(
        "--any-sign",
        help="Allow coefficients of any sign, whatever physics says: time per token, request or byte is not negative.",
    ),
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


def server_options(
    run_config: Path | None,
    model_config: Path | None,
    gpu: str | None,
    tp: int | None,
    settings: list[str] | None,
) -> ServerOptions:
    """Collect what a command was told of the servers behind the traces."""
    from tracefit.commands.ingest import ServerOptions, parse_assignments
    from tracefit.server.settings import settings_from

    given = {**parse_assignments(settings or []), "tensor_parallel": tp}
    return ServerOptions(run_config, model_config, gpu, settings_from(given, where="--set"))


def keys_of(texts: list[str] | None) -> tuple[str, ...]:
    """Return the keys of attributes in the values of an option; several may stand in one, comma separated."""
    keys = [key.strip() for text in texts or [] for key in text.split(",")]
    return tuple(key for key in keys if key)


def ingest_options(context: typer.Context) -> IngestOptions:
    """Collect the options of a command that say what is kept of traces and how much of a file is read."""
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
    """Collect what a command was told of training: `run` and `train` take every option under its name in TrainOptions."""
    from tracefit.coefficients.verdicts import override
    from tracefit.commands.train import TrainOptions

    told = {field.name: context.params[field.name] for field in dataclasses.fields(TrainOptions)}
    told["beta_target"] = told["beta_target"].value
    told["thresholds"] = override(told["thresholds"] or [])
    return TrainOptions(**told)
