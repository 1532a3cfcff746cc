"""Arguments and options that several commands share, each with its help, and their conversion for the library.

An option of several commands is one entry of a group (`SERVER`, `INGEST`, `ENGINE`, `TRAIN`); a command says which groups it `takes`,
and a function for each group makes of their values what the library expects.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

import typer

from tracefit.console import warn

if TYPE_CHECKING:
    from tracefit.commands.ingest import ServerOptions
    from tracefit.commands.reading import IngestOptions
    from tracefit.commands.train import TrainOptions
    from tracefit.engines.choice import EngineChoice


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
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]

# -- options of several commands ------------------------------------------------------------------------
#
# A group is declared once, whatever the number of commands that take it: name to what typer reads, and its default.

Group = Mapping[str, tuple[Any, Any]]


def _option(kind: Any, default: Any, *flags: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*flags, **settings)], default


SERVER: Group = {
    "run_config": _option(
        Optional[Path],
        None,
        help="exp-config.yaml or run.yaml, a `vllm serve` command line, or a server log, for every run.",
    ),
    "model_config": _option(Optional[Path], None, help="The model's config.json, for every run."),
    "gpu": _option(Optional[str], None, help="GPU name, such as H100, or a JSON file that describes one."),
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

INGEST: Group = {
    "all_spans": (AllSpans, False),
    "keep_attributes": (KeepAttributes, None),
    "show_values": _option(
        bool,
        False,
        "--show-values",
        help="Show the content of rejected records, not only their structure; it is private data.",
    ),
    "max_document": _option(
        int,
        256,
        min=1,
        metavar="MIB",
        help="Longest JSON document, line or protobuf message that is read, in MiB.",
    ),
    "max_rejects": _option(
        int, 100_000, min=1, help="Bad records after which the rest of a file is not read."
    ),
}
"""What is read, and which part of it is kept; read by `ingest_options`."""

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
        help="Feature set for step times: batch, roofline, roofline_max, work_max, a YAML or JSON file, or auto to let "
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
        help="Also leave out every run, model and GPU in turn, and measure models fitted on the others.",
    ),
    "thresholds": _option(
        Optional[list[str]],
        None,
        "--threshold",
        metavar="USE.MEASURE=YES:WITH_LIMITS",
        help="What a use requires of the models, such as simulation.step_mape_pct=12:30; repeatable.",
    ),
}
"""How models are fitted: each under its name in `TrainOptions`; read by `train_options`."""


_Command = TypeVar("_Command", bound=Callable[..., None])


def takes(*groups: Group) -> Callable[[_Command], _Command]:
    """Give a command the options of some groups, before its own keyword-only ones; it finds their values in its context."""

    def with_options(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for group in groups
            for name, (kind, default) in group.items()
        ]
        # What typer reads: the function itself takes them as `**options`.
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]  # functions have no declared one
            parameters=[*own[: len(own) - len(last)], *shared, *last]
        )
        return command

    return with_options


def server_options(context: typer.Context, *settings: str) -> ServerOptions:
    """Collect the options that describe the servers behind the traces; `settings` come before those of the user."""
    from tracefit.commands.ingest import ServerOptions, parse_assignments
    from tracefit.server.settings import SETTINGS, canonical_name, settings_from

    options = context.params
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


def keys_of(texts: list[str] | None) -> tuple[str, ...]:
    """Return the keys of attributes in the values of an option; several may stand in one, comma separated."""
    # Environment and configuration file hold one text for an option; commas let it name several keys there.
    keys = [key.strip() for text in texts or [] for key in text.split(",")]
    return tuple(key for key in keys if key)


def ingest_options(context: typer.Context) -> IngestOptions:
    """Collect the options that bound reading and choose which part of the traces is kept."""
    from tracefit.commands.reading import IngestOptions

    given = context.params
    return IngestOptions(
        all_spans=given["all_spans"],
        keep_attributes=keys_of(given["keep_attributes"]),
        show_values=given["show_values"],
        max_document=given["max_document"] << 20,
        max_rejects=given["max_rejects"],
    )


def engine_options(context: typer.Context) -> EngineChoice:
    """Collect where traces are decoded."""
    from tracefit.engines.choice import EngineChoice

    return EngineChoice(context.params["engine"], context.params["ray_address"])


def train_options(context: typer.Context) -> TrainOptions:
    """Collect the training options: `run` and `train` take every option under its name in TrainOptions."""
    from tracefit.coefficients.verdicts import override
    from tracefit.commands.train import TrainOptions

    # An option that is missing here is a KeyError in every run: none can be forgotten silently.
    given = {field.name: context.params[field.name] for field in dataclasses.fields(TrainOptions)}
    given["thresholds"] = override(given["thresholds"] or [])
    return TrainOptions(**given)
