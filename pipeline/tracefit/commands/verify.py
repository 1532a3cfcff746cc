"""Refit a coefficient file from tables and confirm each of its numbers, or say which input differs."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracefit._version import __version__
from tracefit.coefficients import publish
from tracefit.coefficients.documents import CoefficientFile
from tracefit.coefficients.files import coefficient_paths, find_models, read_coefficients, read_plain, to_json
from tracefit.commands.fitting import fit_runs
from tracefit.commands.locate import trained_tables
from tracefit.errors import DataError, TracefitError
from tracefit.options import FeaturesFileOption, TablesOption, TrainOptions, VerifiedArgument, named
from tracefit.progress import NullProgress, Progress
from tracefit.results.models import Difference, VerifyResult
from tracefit.server.documents import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import polars as pl

    from tracefit.coefficients.documents import Provenance
    from tracefit.fit.fitted import FittedDeployment
    from tracefit.tables.store import TableStore

RELATIVE = 1e-6
"""Relative difference up to which two numbers are the same: machines differ by less."""

_SMALLEST = 1e-9
MOST_SHOWN = 50

_Fitted = dict[tuple[TrainOptions, tuple[str, ...]], "list[FittedDeployment]"]
"""Deployments by the options and the runs that they are fitted with."""


def verify(
    file: VerifiedArgument,
    tables: TablesOption = None,
    *,
    features: FeaturesFileOption = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Refit the runs that a coefficient file names, with the options that it names, and compare every value except
    provenance.

    Args:
        file: alpha.json or beta.json; or a folder with both, or one that `run` wrote, for all files in it.
        tables: Tables with its runs; `tables` next to or in the models' folder if not given.
        features: Where the feature-set file is now, if it moved.
        progress: Receives reports on the progress.

    Raises:
        UsageError: The file or the folder is not valid.
        DataError: The file does not state how it was made, or is of a transfer.

    Examples:
        >>> import tracefit
        >>> tracefit.verify("out/models/beta.json").verified
        True
    """
    path = find_models(file)
    documents = {one: read_coefficients(one) for one in coefficient_paths(path)}
    if any(one.provenance and one.provenance.options.get("command") == "transfer" for one in documents.values()):
        raise DataError(
            "is of a transfer, which no refit confirms",
            where=str(path),
            hint="compare it with traces of the server: `tracefit compare MODELS TABLES`",
        )
    store = trained_tables(path, tables)
    progress = progress or NullProgress()
    fitted: _Fitted = {}
    if not path.is_dir():
        return _verify_file(path, store, features, progress, fitted)
    # Where no alpha model, or no beta model, could be fitted its file says so and holds no number.
    filled = [one for one, document in documents.items() if document.models]
    return _together(path, [_verify_file(one, store, features, progress, fitted) for one in filled or documents])


def _together(folder: Path, results: list[VerifyResult]) -> VerifyResult:
    """Join the results of the files of a folder; places begin with the file."""
    differences = [replace(d, place=f"{r.file.name}: {d.place}") for r in results for d in r.differences]
    return VerifyResult(
        folder,
        all(r.verified for r in results),
        sum(r.numbers for r in results),
        tuple(dict.fromkeys(text for r in results for text in r.inputs)),
        sum(r.differing for r in results),
        tuple(differences[:MOST_SHOWN]),
        tuple(dict.fromkeys(text for r in results for text in r.notes)),
    )


def _verify_file(
    path: Path, store: TableStore, features: str | Path | None, progress: Progress, fitted: _Fitted
) -> VerifyResult:
    """Refit one file and compare it; `fitted` has the deployments that another file of the folder was refitted with."""
    document, plain = read_coefficients(path), read_plain(path, CoefficientFile)
    made_by = document.provenance
    if made_by is None or not any(m.training for m in document.models):
        raise DataError("does not say how it was made: no provenance or no training", where=str(path))
    options = _options(made_by, features)
    run_ids = sorted({run for m in document.models if m.training for run in m.training.runs})
    runs = store.read("runs", run_ids)
    inputs = [*_runs_that_differ(document, runs), *_files_that_differ(made_by, options)]
    notes = _versions_that_differ(made_by)
    lacking = set(run_ids) - set(runs["run_id"])
    if lacking or any(text.startswith("features ") for text in inputs):
        return VerifyResult(path, False, 0, tuple(inputs), 0, (), tuple(notes))
    made_from = options, tuple(run_ids)
    if made_from not in fitted:
        fitted[made_from] = fit_runs(store, runs, options, progress)
    deployments = fitted[made_from]
    alpha, beta, _ = publish.coefficient_files(deployments, made_by)
    again = json.loads(to_json(alpha if document.kind == "alpha" else beta))
    compared = list(_compare(_by_name(plain), _by_name(again), ""))
    differing = [d for d in compared if d is not None]
    verified = not differing and not inputs
    shown = tuple(differing[:MOST_SHOWN])
    return VerifyResult(path, verified, len(compared), tuple(inputs), len(differing), shown, tuple(notes))


def _options(made_by: Provenance, features: str | Path | None) -> TrainOptions:
    usual = TrainOptions()
    stated = {name: made_by.options[name] for name in TrainOptions.__slots__ if name in made_by.options}
    # The file is input like any other: an option of another type would fail somewhere in the fit.
    odd = [name for name, value in stated.items() if type(value) is not type(getattr(usual, name))]
    if odd:
        raise DataError(f"its options are not of their types: {', '.join(odd)}", where="provenance.options")
    # A mapping of options by name is beyond what the type of `replace` can express.
    options = replace(usual, **stated)  # type: ignore[arg-type]
    return options if features is None else replace(options, features=str(features))


def _runs_that_differ(document: CoefficientFile, runs: pl.DataFrame) -> Iterator[str]:
    here = {one.run_id: one for one in publish.run_inputs(runs)}
    trainings = [m.training for m in document.models if m.training]
    stated = {one.run_id: one for training in reversed(trainings) for one in reversed(training.inputs)}
    for run_id in dict.fromkeys(run for training in trainings for run in training.runs):
        if run_id not in here:
            yield f"run {run_id} is not in the tables"
            continue
        if run_id not in stated:
            continue
        ours, theirs = here[run_id], stated[run_id]
        if ours.traces_sha256 != theirs.traces_sha256:
            yield f"traces of run {run_id}: sha256 {ours.traces_sha256[:12]}…, not {theirs.traces_sha256[:12]}…"
        if ours.context_sha256 != theirs.context_sha256:
            yield f"settings, config.json or GPU of run {run_id}: not those the file was made with"


def _files_that_differ(made_by: Provenance, options: TrainOptions) -> Iterator[str]:
    for option, wanted in made_by.files.items():
        path = Path(options.features)
        try:
            digest = hashlib.sha256(read_bytes(path)).hexdigest()
        except TracefitError:
            yield f"{option} file {path} cannot be read; name it with {named(FeaturesFileOption)}"
            continue
        if digest != wanted:
            yield f"{option} file {path}: sha256 {digest[:12]}…, not {wanted[:12]}…"


def _versions_that_differ(made_by: Provenance) -> list[str]:
    here = {"tracefit": __version__, **publish.libraries()}
    there = {"tracefit": made_by.version, **made_by.libraries}
    return [
        f"{name} {version} here, {there[name]} in the file"
        for name, version in here.items()
        if there.get(name, version) != version
    ]


def _by_name(plain: Mapping[str, object]) -> dict[str, object]:
    """Key models by name and deployment, so that a missing one is reported as such."""
    models = plain["models"]
    if not isinstance(models, list):
        raise TypeError("models is not a list")
    keyed = {f"{m['name']} of {m.get('deployment_id')}": m for m in models}
    return {**{k: v for k, v in plain.items() if k not in {"models", "provenance", "not_fitted"}}, **keyed}


def _compare(there: object, here: object, path: str) -> Iterator[Difference | None]:
    """Yield None for every confirmed value and a difference for every other; keys that the file lacks are ignored."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key, value in there.items():
            yield from _compare(value, here.get(key), f"{path}.{key}" if path else str(key))
    # Lists of different lengths are one difference: matching their items would report every one of them.
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, pair in enumerate(zip(there, here, strict=True)):
            yield from _compare(*pair, f"{path}[{index}]")
    elif _same(there, here):
        yield None
    else:
        yield Difference(path, _short(there), _short(here))


def _same(there: object, here: object) -> bool:
    if isinstance(there, float) and isinstance(here, float):
        # A number that is zero up to rounding has no relative error.
        return math.isclose(there, here, rel_tol=RELATIVE, abs_tol=_SMALLEST)
    return there == here


def _short(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:120]
