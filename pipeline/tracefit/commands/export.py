"""Export coefficient files in the form that a consumer loads."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tracefit import consumers
from tracefit.coefficients.files import find_models
from tracefit.coefficients.models import load
from tracefit.commands.deployments import deployments_of, load_deployment
from tracefit.commands.described import NOTE, described_tables
from tracefit.commands.locate import choose_deployment, trained_tables
from tracefit.consumers.base import OUT, Source
from tracefit.errors import DataError, UsageError, known_names
from tracefit.inputs.buckets import location_of
from tracefit.options import (
    ConsumerOption,
    ConsumerVersionOption,
    DeploymentOption,
    ExportOutOption,
    ModelsArgument,
    RunOption,
    TablesOption,
    named,
)
from tracefit.results.models import ExportResult
from tracefit.tables.disk import write_files

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.fit.fitted import DeploymentTables
    from tracefit.models.deployment import DeploymentModels
    from tracefit.server.context import Deployment

# A number of millions of digits takes minutes to convert.
_MOST_DIGITS = 6
_BELOW_STEPS = "its tables are per operator, finer than a trace of steps can resolve"
_REFUSED_EXPORTS = {
    **dict.fromkeys(("vidur", "llmservingsim"), _BELOW_STEPS),
    "aiconfigurator": f"{_BELOW_STEPS}; its tables of whole passes are those of AISimulate, {{to}} aisimulate",
    "wva": (
        "since 2026 it learns its parameters online, and no configuration takes any; it takes targets of TTFT and ITL"
    ),
}


def export(
    models: ModelsArgument,
    to: ConsumerOption,
    out: ExportOutOption,
    *,
    tables: TablesOption = None,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    consumer_version: ConsumerVersionOption = None,
) -> ExportResult:
    """Write the files that a consumer loads, refitted where the consumer's form differs.

    Args:
        models: A coefficient file, a folder of them, or a folder that `run` wrote.
        to: The consumer, one of `consumers.CONSUMERS`.
        out: Folder for the files.
        tables: The tables that the models were trained on; `tables` next to or in the models' folder if not given.
        deployment: See `Models.deployment`.
        run: A run of the deployment, instead of its id.
        consumer_version: The consumer's version, such as `0.9.2`, if an older one needs another form.

    Raises:
        UsageError: The consumer, a file or a folder is wrong.
        DataError: The data cannot give the consumer's form; the error has the reason.

    Examples:
        >>> import tracefit
        >>> [path.name for path in tracefit.export("out/", to="csv", out="csv/").files]
        ['coefficients.csv']
    """
    if to.lower() in _REFUSED_EXPORTS:
        raise DataError(f"{to} cannot be served: {_REFUSED_EXPORTS[to.lower()].format(to=named(ConsumerOption))}")
    version = _version_of(to, consumer_version)
    loaded = load(find_models(models))
    chosen = loaded.deployment(choose_deployment(loaded, deployment, run))
    source = Source(chosen, lambda: _trained_on(chosen, location_of(models), tables), version)
    made = consumers.CONSUMERS[to](source)
    paths = {location_of(out) / name: content for name, content in made.files.items()}
    write_files(paths)
    folder = shlex.quote(str(out).rstrip("/") or "/")
    # A consumer whose form needs no refit takes the coefficient files as they are.
    described = [NOTE] if _is_described(chosen) and source.has_read else []
    usage, *notes = (text.replace(OUT, folder) for text in (made.usage, *described, *made.notes))
    return ExportResult(to, chosen.deployment_id, tuple(paths), made.errors, tuple(notes), usage)


def _version_of(to: str, version: str | None) -> tuple[int, ...] | None:
    """Return the version of a consumer as numbers, null without one.

    Raises:
        UsageError: The consumer is unknown or has one form for all versions, or the text is not a version.
    """
    option = named(ConsumerVersionOption)
    if to not in consumers.CONSUMERS:
        raise UsageError(f"consumer {to} is not known", hint=known_names(to, consumers.CONSUMERS))
    if version is None:
        return None
    if to not in consumers.VERSIONED:
        versioned = ", ".join(consumers.VERSIONED)
        raise UsageError(f"{to} has one form for all versions", where=option, hint=f"for {versioned}")
    numbers = version.strip().removeprefix("v").split(".")
    if not all(n.isdecimal() and len(n) < _MOST_DIGITS for n in numbers):
        raise UsageError("is not a version", where=f"{option} {version[:40]}", hint="such as 0.9.2")
    return tuple(map(int, numbers))


def _trained_on(
    chosen: DeploymentModels, models: Path, tables: str | Path | None
) -> tuple[Deployment, DeploymentTables]:
    if _is_described(chosen):
        return described_tables(chosen, models if models.is_dir() else models.parent)
    store = trained_tables(models, tables)
    training = chosen.step_model.training
    run_ids = list(training.runs) if training is not None else None
    runs = store.read("runs", run_ids)
    # Refitting on other runs would give coefficients of other data under the same name.
    if missing := sorted(set(run_ids or ()) - set(runs["run_id"])):
        raise DataError(
            f"runs {', '.join(missing)} that the models were trained on are not here", where=str(store.root)
        )
    for deployment, members in deployments_of(runs, str(store.root)):
        if deployment.deployment_id == chosen.deployment_id:
            return deployment, load_deployment(store, members)
    raise DataError(
        f"no run of deployment {chosen.deployment_id} is here",
        where=str(store.root),
        hint="give the tables it was trained on",
    )


def _is_described(chosen: DeploymentModels) -> bool:
    """Return whether the model of step times comes from other servers' steps, so that there are no tables of its
    own.
    """
    return chosen.step_model.origin != "fitted"
