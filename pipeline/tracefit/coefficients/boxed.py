"""The law that the package carries: coefficients from public points of servers, and its errors on servers that were
left out.

The file beside this module is written by `make law` from public points, which are not in it.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from pydantic import Field

from tracefit.features.law import LAW_BATCH_COLUMNS, LAW_TERMS
from tracefit.fit.points import POINT_TERMS, fit_points, leave_points_out, point_errors
from tracefit.fit.results import LeftOutErrors
from tracefit.fit.transfer import DECODES, Law, LawRows, TransferErrors, group_of, parts_of_model
from tracefit.fit.validation import measure, skill
from tracefit.models.schema import LawCoefficient, Strict, TransferKind
from tracefit.models.targets import CYCLE_TIME
from tracefit.server.documents import FiniteNumber, Scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.points import PointFold, PointServer
    from tracefit.server.context import Deployment, RunContext
    from tracefit.statistics import Vector

ENGINES = ("vllm",)
"""Engines that the package has a law of."""
LAW_KINDS: tuple[TransferKind, ...] = ("tensor_parallel", "model", "gpu", "model_and_gpu")


class BoxedServer(Strict):
    """A server whose points or steps the law is fitted to.

    Attributes:
        deployment_id: Its id.
        model: Position of its model in `models`.
        gpu: Its GPU.
        tensor_parallel: GPUs that share its layers.
        points: Points that are used.
        steps: Steps that are used.
    """

    deployment_id: str
    model: int
    gpu: str
    tensor_parallel: int
    points: int
    steps: int = 0


class BoxedErrors(Strict):
    """Errors on the servers that were left out, of one kind, in percent of the time per token, over all their points.

    Attributes:
        groups: Groups that were left out in turn.
        points: Points of all of them.
        p90_ape_pct: The error that nine of ten points keep to.
        sd_log: Standard deviation of the logarithm of a server's mean time per token over the predicted one.
        covered_pct: Percent of the points within the interval of 80 % that the other groups give.
        calibrated_mdape_pct: Median error at the other points of a server after ten of its points.
        uncalibrated_mdape_pct: The same without them, on the servers that have so many.
    """

    groups: int
    points: int
    mdape_pct: float
    p90_ape_pct: float
    sd_log: float
    nearest_mdape_pct: float
    roofline_mdape_pct: float
    covered_pct: float | None
    calibrated_mdape_pct: float | None
    uncalibrated_mdape_pct: float | None


class BoxedLaw(Strict):
    """A law that is fitted to points of servers.

    Attributes:
        engine: Engine of the servers.
        source: Name of the points, and where they are published.
        sha256: Digest of the file with them.
        command: The command that wrote this file.
        rows: Rows of the source by what became of them: used, or the reason why not.
        law: The coefficients.
        servers: The servers.
        models: Facts of their models.
        parts: Kinds of layers and precisions that they have.
        reach: Least and largest mean batch: decoding requests, cached tokens of each, and the tokens of a prompt.
        errors: Errors on servers that were left out, by kind.
        across: The same for each group.
    """

    engine: str
    source: str
    sha256: str
    command: str
    rows: dict[str, int]
    law: tuple[LawCoefficient, ...]
    servers: tuple[BoxedServer, ...]
    models: tuple[dict[str, Scalar], ...]
    parts: tuple[str, ...]
    reach: dict[str, tuple[FiniteNumber, FiniteNumber]]
    errors: dict[TransferKind, BoxedErrors]
    across: tuple[LeftOutErrors, ...] = Field(default=())

    def fitted(self) -> Law:
        """Return the law, to be evaluated and to be drawn to points or steps."""
        values = {c.feature: c.value for c in self.law}
        terms = tuple(t for t in LAW_TERMS if t.feature.name in values)
        return Law(terms, tuple(values[t.feature.name] for t in terms))

    def kind_for(self, target: RunContext) -> TransferKind:
        """Return what of a server none of the law's servers has: the tensor parallelism, or a setting, where one has
        its model on its GPU.

        Where some have the model and others the GPU, it is the one of the two that is known less well.
        """
        facts, gpu = _facts_of(target), target.gpu.name if target.gpu else None
        of_model = [n for n, one in enumerate(self.models) if facts == {k: v for k, v in one.items() if k != "model"}]
        gpus_of_model = {one.gpu for one in self.servers if one.model in of_model}
        if gpu in gpus_of_model:
            return "tensor_parallel"
        has_gpu = gpu in {one.gpu for one in self.servers}
        if gpus_of_model and has_gpu:
            kinds: tuple[TransferKind, ...] = ("model", "gpu")
            return max(kinds, key=lambda kind: self.errors[kind].p90_ape_pct)
        if gpus_of_model:
            return "gpu"
        return "model" if has_gpu else "model_and_gpu"

    def expected(self, kind: TransferKind) -> TransferErrors:
        """Return the errors to expect of a transfer of a kind."""
        errors = self.errors[kind]
        return TransferErrors({DECODES: errors.p90_ape_pct}, errors.sd_log, errors.groups)

    def batches(self, deployment: Deployment) -> LawRows:
        """Return the corners of the batches that the points reach, as steps of a server."""
        batch, context = self.reach["num_decode_reqs"], self.reach["context_tokens_per_request"]
        # The prompts of a point are spread over its steps: a step has none, or one.
        prompts = (0.0, *self.reach["prompt_tokens"])
        corners = [(n, tokens, prompt) for n in batch for tokens in context for prompt in prompts]
        values = {
            "num_prefill_reqs": [float(prompt > 0) for _, _, prompt in corners],
            "num_decode_reqs": [n for n, _, _ in corners],
            "prefill_tokens": [prompt for _, _, prompt in corners],
            "decode_tokens": [n for n, _, _ in corners],
            "context_tokens": [n * tokens for n, tokens, _ in corners],
        }
        zeros = [0.0] * len(corners)
        return LawRows(deployment, pl.DataFrame({f"of_{n}": values.get(n, zeros) for n in LAW_BATCH_COLUMNS}))


def _facts_of(context: RunContext) -> dict[str, Scalar]:
    if context.architecture is None:
        return {}
    return {name: value for name, value in context.architecture.facts().items() if name != "model"}


@cache
def boxed_law(engine: str) -> BoxedLaw:
    """Return the law of an engine that the package carries.

    Raises:
        KeyError: It carries no law of this engine.
    """
    if engine not in ENGINES:
        raise KeyError(engine)
    text = resources.files(__package__).joinpath(f"law_{engine}.json").read_text(encoding="utf-8")
    return BoxedLaw.model_validate_json(text)


def box(
    servers: Sequence[PointServer],
    *,
    engine: str,
    source: str,
    sha256: str,
    command: str,
    rows: dict[str, int],
) -> BoxedLaw:
    """Fit a law to the points of some servers, and measure it on servers that are left out.

    Args:
        servers: The servers, each with at least one point or step.
        engine: Their engine.
        source: Name of the points, and where they are published.
        sha256: Digest of the file with them.
        command: The command that writes the law.
        rows: Rows of the source by what became of them.
    """
    law = fit_points(servers)
    folds = {kind: leave_points_out(servers, kind) for kind in LAW_KINDS}
    laws = [fold.law for of_kind in folds.values() for fold in of_kind]
    contexts = [one.deployment.context for one in servers]
    columns = ("of_context_tokens", "of_num_decode_reqs")
    batches = pl.concat([one.rows.rows.select(pl.col(columns).cast(pl.Float64)) for one in servers])
    per_request = batches["of_context_tokens"] / batches["of_num_decode_reqs"]
    models = {group_of(c, "model"): c.architecture for c in contexts if c.architecture is not None}
    return BoxedLaw(
        engine=engine,
        source=source,
        sha256=sha256,
        command=command,
        rows=rows,
        law=tuple(
            LawCoefficient(
                feature=t.feature.name,
                unit=t.feature.coefficient_unit,
                value=float(f"{value:.6g}"),
                part="always",
                low=t.low,
                high=t.high if np.isfinite(t.high) else None,
                prior=t.prior,
                left_out_range=_range([one.value(t.feature.name) for one in laws]),
            )
            for t, value in zip(POINT_TERMS, law.coefficients, strict=True)
        ),
        servers=tuple(_server(one, list(models)) for one in servers),
        models=tuple(dict(one.facts()) for one in models.values()),
        parts=tuple(dict.fromkeys(part for c in contexts for part in parts_of_model(c))),
        reach={
            "num_decode_reqs": _range(batches["of_num_decode_reqs"].to_list()),
            "context_tokens_per_request": _range(per_request.to_list()),
            "prompt_tokens": _range([n for one in servers for n in one.points["prompt_tokens"]]),
        },
        errors={kind: _errors_of(of_kind) for kind, of_kind in folds.items()},
        across=tuple(
            _left_out([fold for fold in of_kind if fold.left_out == group], kind)
            for kind, of_kind in folds.items()
            for group in dict.fromkeys(fold.left_out for fold in of_kind)
        ),
    )


def _server(one: PointServer, models: Sequence[object]) -> BoxedServer:
    context = one.deployment.context
    return BoxedServer(
        deployment_id=one.deployment.deployment_id,
        model=models.index(group_of(context, "model")),
        gpu=context.gpu.name if context.gpu else "",
        tensor_parallel=context.settings.tensor_parallel or 1,
        points=one.points.height,
        steps=0 if one.has_points else one.rows.rows.height,
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    return float(f"{min(values):.6g}"), float(f"{max(values):.6g}")


def _errors_of(folds: Sequence[PointFold]) -> BoxedErrors:
    expected = point_errors(folds)
    ape = np.concatenate([fold.ape_pct for fold in folds])
    covered = np.concatenate([fold.is_covered for fold in folds])
    calibrated = [fold for fold in folds if len(fold.calibrated_pct)]

    def median(name: str) -> float:
        errors = [100 * np.abs(getattr(fold, name) - fold.actual) / fold.actual for fold in folds]
        return float(np.median(np.concatenate(errors)))

    return BoxedErrors(
        groups=expected.folds,
        points=len(ape),
        mdape_pct=median("predicted"),
        p90_ape_pct=expected.p90_ape_pct[DECODES],
        sd_log=expected.sd_log,
        nearest_mdape_pct=median("unchanged"),
        roofline_mdape_pct=median("at_rated"),
        covered_pct=float(100 * covered.mean()) if len(covered) else None,
        calibrated_mdape_pct=float(np.median(np.concatenate([f.calibrated_pct for f in calibrated])))
        if calibrated
        else None,
        uncalibrated_mdape_pct=float(np.median(np.concatenate([f.ape_pct for f in calibrated])))
        if calibrated
        else None,
    )


def _left_out(folds: Sequence[PointFold], kind: TransferKind) -> LeftOutErrors:
    """Return the errors at all points of the servers that were left out together."""

    def joined(name: str) -> Vector:
        return np.concatenate([getattr(fold, name) for fold in folds])

    actual, covered = joined("actual"), joined("is_covered")
    errors, baseline = measure(actual, joined("predicted")), measure(actual, joined("median"))
    return LeftOutErrors(
        kind=kind,
        left_out=folds[0].left_out,
        model=CYCLE_TIME.model,
        deployment_id=None,
        feature_set="law",
        trained_on=(),
        rows_used=0,
        errors=errors,
        baseline=baseline,
        gradient_boosting=None,
        skill=skill(errors, baseline),
        interval_coverage_pct=float(100 * covered.mean()) if len(covered) else None,
        nearest=measure(actual, joined("unchanged")),
        roofline=measure(actual, joined("at_rated")),
        by_phase={DECODES: errors},
    )
