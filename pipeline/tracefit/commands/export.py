"""Coefficient files to what a consumer loads."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.models import load
from tracefit.commands.train import load_scope, scopes_of
from tracefit.consumers.blis import to_blis, to_blis_registry
from tracefit.consumers.dynamo import to_dynamo
from tracefit.consumers.llmd_sim import to_llmd_sim
from tracefit.consumers.source import OUT, Export, Source
from tracefit.consumers.table import to_csv
from tracefit.consumers.wva import to_wva
from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.results.exports import ExportResult
from tracefit.tables.disk import write_files
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracefit.coefficients.predict import ScopeModels

_FITTED: Mapping[str, Callable[[Source], Export]] = {
    "blis": to_blis,
    "blis-registry": to_blis_registry,
    "llm-d-inference-sim": to_llmd_sim,
    "wva": to_wva,
    "dynamo-mocker": to_dynamo,
}
CONSUMERS = (*_FITTED, "csv")
_VERSIONED = ("llm-d-inference-sim",)
_MOST_DIGITS = 6
_BELOW_STEPS = "its tables are per operator, below what a trace of steps can tell"
_REFUSED = dict.fromkeys(("vidur", "llmservingsim", "aiconfigurator"), _BELOW_STEPS)


def export(
    models: str | Path,
    to: str,
    out: str | Path,
    *,
    tables: str | Path | None = None,
    scope: str | None = None,
    consumer_version: str | None = None,
) -> ExportResult:
    """Write what a consumer loads, fitted on its own terms where they differ from ours.

    Args:
        models: A coefficient file or a folder of them.
        to: The consumer, one of `CONSUMERS`.
        out: Folder for the files.
        tables: The tables the models were trained on; `tables` beside or in the models' folder if not given.
        scope: See `Models.scope`.
        consumer_version: The consumer's version, such as `0.9.2`, where older ones need another form.

    Raises:
        UsageError: The consumer, a file or a folder is wrong.
        DataError: What the consumer needs cannot be had from these data, with the reason.
    """
    if to.lower() in _REFUSED:
        raise DataError(f"{to} cannot be served: {_REFUSED[to.lower()]}")
    if to not in CONSUMERS:
        close = did_you_mean(to, CONSUMERS)
        known = f"known: {', '.join(CONSUMERS)}"
        raise UsageError(f"consumer {to} is not known", hint=f"{close} {known}" if close else known)
    version = _version(to, consumer_version)
    chosen = load(models).scope(scope)
    if to == "csv":
        made = to_csv(chosen)
    else:
        made = _FITTED[to](replace(_source(chosen, Path(models), tables), consumer_version=version))
    paths = {Path(out) / name: content for name, content in made.files.items()}
    write_files(paths)
    folder = shlex.quote(str(out))
    usage, *notes = (text.replace(OUT, folder) for text in (made.usage, *made.notes))
    return ExportResult(to, chosen.scope_id, tuple(paths), made.errors, tuple(notes), usage)


def _version(to: str, text: str | None) -> tuple[int, ...] | None:
    """Read a version number, of the one consumer whose older versions take another form.

    Raises:
        UsageError: It is no version, or the consumer has one form only.
    """
    if text is None:
        return None
    if to not in _VERSIONED:
        raise UsageError(
            f"{to} has one form for all versions", where="--consumer-version", hint=f"for {_VERSIONED[0]}"
        )
    numbers = text.strip().removeprefix("v").split(".")
    if not all(n.isdecimal() and len(n) < _MOST_DIGITS for n in numbers):
        raise UsageError("is not a version", where=f"--consumer-version {text[:40]}", hint="such as 0.9.2")
    return tuple(int(n) for n in numbers)


def _source(chosen: ScopeModels, models: Path, tables: str | Path | None) -> Source:
    store = TableStore(Path(tables) if tables is not None else _beside(models)).require()
    training = chosen.step_model.training
    run_ids = list(training.runs) if training is not None else None
    runs = store.read("runs", run_ids)
    missing = sorted(set(run_ids or []) - set(runs["run_id"]))
    if missing:
        raise DataError(
            f"runs {', '.join(missing)} that the models were trained on are not here", where=str(store.root)
        )
    found = [(s, m) for s, m in scopes_of(runs, str(store.root)) if s.scope_id == chosen.scope_id]
    if not found:
        raise DataError(
            f"no run of scope {chosen.scope_id} is here",
            where=str(store.root),
            hint="give the tables it was trained on",
        )
    scope, members = found[0]
    return Source(
        chosen, scope, load_scope(store, runs.filter(pl.col("run_id").is_in(members)), scope, members)
    )


def _beside(models: Path) -> Path:
    folder = models if models.is_dir() else models.parent
    for place in (folder / "tables", folder.parent / "tables"):
        if place.is_dir():
            return place
    raise UsageError(
        "the tables that the models were trained on are needed",
        where=str(models),
        hint="give them with --tables",
    )
