"""Transfer: fit the law to the steps of traced servers, measure it on servers that are left out, and draw it to a few
steps of a new one.

Sources are chosen first: deployments of the same model and GPU if there are any; else those of the same GPU; else all.
The law of the others, first of those on other GPUs, then of other models on this one, is what the Ridge draws to: what
the sources cannot tell apart is as it was found there. The property that differs is the kind of a transfer, and its
errors are those of the same kind: each tensor parallelism, model or GPU among the sources is left out in turn.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import msgspec
import numpy as np
import polars as pl

from tracefit.features import training
from tracefit.features.law import (
    COMPUTE,
    LAUNCH,
    LAW_BATCH_COLUMNS,
    LAW_TERMS,
    MEMORY,
    OVERHEAD,
    LawForm,
    LawTerm,
    with_law,
)
from tracefit.features.sets import LAW_SET, Feature, add_features
from tracefit.fit.beta import choose_target, duration_cover
from tracefit.fit.fitted import matrix, target_of
from tracefit.fit.law import LawRegressor, Part
from tracefit.fit.splits import (
    LEFT_OUT_ALWAYS,
    PREEMPTION_HEAVY,
    UNKNOWN_FEATURES,
    WARM_UP,
    is_excluded,
    step_frame,
)
from tracefit.fit.validation import measure
from tracefit.models.validation import NO_ROWS
from tracefit.tables.sources import SOURCES, is_from

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

    from tracefit.fit.fitted import DeploymentTables
    from tracefit.models.validation import Metrics
    from tracefit.server.architecture import Attention
    from tracefit.server.context import Deployment, RunContext
    from tracefit.statistics import Flags, Vector

Kind = Literal["tensor_parallel", "model", "gpu", "model_and_gpu"]
"""Property of the new server that its sources do not have."""

DECODES, PROMPTS = "decodes", "prompts"
PHASES = (DECODES, PROMPTS)
"""Steps without and with prompts."""

STRENGTH = 0.002
"""Strength of the Ridge towards the priors for one source; n sources divide it by n squared.

It decides between coefficients that few servers cannot tell apart, such as those of kernels and of weights, and is too
weak to move those that many servers can.
"""
CALIBRATION_STRENGTH = 0.02
"""Strength of the Ridge towards the transferred coefficients for one step, which more of them divide."""

MOST_LAW_ROWS = 1_500
"""Steps of a phase that a deployment is fitted with, evenly in time: more of them show the same."""
PROMPT_SHARE = 0.3
"""Least share of all weights on steps with prompts, where there are any."""
FEWEST_FOLDS = 5
"""Folds from which on an interval is of the errors of all together; of fewer, the worst decides."""
TRANSFER_LEVEL_PCT = 90.0
_BLOCK_TOKENS = 16
"""Tokens of a KV block where the server does not state them: vLLM's default on GPUs."""
FEWEST_STEPS = 20
"""Steps that a calibration needs."""
OWN_STEPS = 300
"""Steps from which on an own fit is tried beside a calibration."""
_FEWEST_SINGLE = 100
_CALIBRATION_BLOCKS = 5
_COMPILING = 2.0
"""Times what a step takes beside the typical one, above which it compiled, or waited for something else."""
_RATED_SHARE = 0.99
FASTER = training.TOO_FAST
COMPILING = "compiling"


# -- the rows of a server --------------------------------------------------------------------------------


class LawRows(msgspec.Struct, frozen=True):
    """The steps of one deployment with the terms of the law, in time order, and `y` in us.

    Attributes:
        deployment: The deployment.
        rows: One row per step, or interval of steps as a mean.
        left_out: Steps that are left out, by reason.
    """

    deployment: Deployment
    rows: pl.DataFrame
    left_out: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def deployment_id(self) -> str:
        """Id of the deployment."""
        return self.deployment.deployment_id

    @property
    def context(self) -> RunContext:
        """Its server."""
        return self.deployment.context

    def group(self, kind: Kind) -> Hashable:
        """Return what a fold of a kind leaves out together: equal for servers that are alike in it."""
        return group_of(self.context, kind)

    @property
    def has_prompts(self) -> bool:
        """Whether any step computes a prompt."""
        return bool(prompts_of(self.rows).any())


def group_of(context: RunContext, kind: Kind) -> Hashable:
    """Return what servers are alike in, among those that a transfer of a kind tells apart: equal where they are."""
    if kind == "tensor_parallel":
        return context.settings.tensor_parallel or 1
    if kind == "gpu":
        return context.gpu
    if kind == "model_and_gpu":
        return group_of(context, "model"), context.gpu
    model = context.architecture
    # A model has many names: its folder, or none at all.
    return model and tuple((name, value) for name, value in model.facts().items() if name != "model")


_PRECISION = {"model", "dtype", "quantization", "weight_bytes", "kv_bytes_per_token", "size_proxy"}
"""Facts of a model that its name and its precision decide."""


def _shape_of(context: RunContext) -> Hashable:
    """Return what models are alike in that differ in nothing but their precision."""
    model = context.architecture
    return model and tuple((name, value) for name, value in model.facts().items() if name not in _PRECISION)


def name_of(context: RunContext, kind: Kind) -> str:
    """Return the name of a server among those that a transfer of a kind tells apart."""
    if kind == "tensor_parallel":
        return f"tp{context.settings.tensor_parallel or 1}"
    gpu = context.gpu.slug if context.gpu else ""
    if kind == "gpu":
        return gpu
    model = context.architecture.slug if context.architecture else ""
    return f"{model} on {gpu}" if kind == "model_and_gpu" else model


def law_rows(deployment: Deployment, tables: DeploymentTables) -> LawRows:
    """Return the steps of a deployment, whose model and GPU are known, with the terms of the law.

    Left out are warm-up, steps that mostly repeat work, those of unknown batches, and those faster than the least that
    the law allows: the weights and the experts read, or the prompts computed, at the rated speed.
    """
    timeline = tables.timeline
    sources = {SOURCES[source] for source in timeline["cycle_source"].drop_nulls().unique()}
    of, _ = choose_target(duration_cover(timeline), "auto", sources)
    rows = step_frame(
        tables,
        with_law(timeline, deployment.context),
        replace(LAW_SET, features=(*LAW_SET.features, *_BATCH_FEATURES)),
        training.constants_of(deployment.context),
        of,
    )
    least = pl.max_horizontal(
        pl.sum_horizontal(
            pl.col(t.feature.name) * t.low
            for t in LAW_TERMS
            if t.feature.name in {"weight_read_us", "moe_expert_read_us"}
        ),
        "prompt_matrix_us",
    )
    known = pl.all_horizontal(pl.col(name).is_not_null() for name in LAW_SET.names)
    left_out = (*LEFT_OUT_ALWAYS, WARM_UP, PREEMPTION_HEAVY)
    reason = (
        pl.when(is_excluded(left_out))
        .then("excluded_reason")
        .when(~known)
        .then(pl.lit(UNKNOWN_FEATURES))
        .when(pl.col("y") <= 0)
        .then(pl.lit(training.NOT_POSITIVE))
        .when(pl.col("y") < _RATED_SHARE * least)
        .then(pl.lit(FASTER))
    )
    rows = rows.with_columns(reason=reason)
    kept = rows.filter(pl.col("reason").is_null())
    single = kept.filter(pl.col("interval_steps") == 1)
    counts = Counter(rows["reason"].drop_nulls().to_list())
    chosen = single if single.height >= _FEWEST_SINGLE else kept
    columns = [
        "run_id",
        "server",
        "step_id",
        "ts_ns",
        "y",
        *LAW_SET.names,
        *(c.name for c in _BATCH_FEATURES),
    ]
    return LawRows(deployment, chosen.select(columns), dict(sorted(counts.items())))


_BATCH_FEATURES = tuple(Feature(f"of_{name}", "1", name) for name in LAW_BATCH_COLUMNS)
"""The batch of a step, for what compares models of other forms."""


def with_prompts_cached(deployment: Deployment, tables: DeploymentTables) -> DeploymentTables | None:
    """Return the tables as if every prompt that was not seen computed had been in the prefix cache, up to its last full
    block.

    The batches of steps that follow from the times of requests have whole prompts: no request states its hits. Null
    where no step is of that kind, or the server has no prefix cache.
    """
    settings, timeline = deployment.context.settings, tables.timeline
    is_counted = is_from(lambda source: source.from_requests)
    if settings.enable_prefix_caching is False or not timeline.select(is_counted.any()).item():
        return None
    rest = (pl.col("num_prefill_reqs") * ((settings.block_size or _BLOCK_TOKENS) + 1) / 2).ceil()
    computed = pl.min_horizontal("prefill_tokens", rest.cast(pl.Int64))
    cached = pl.col("prefill_context_tokens").fill_null(0) + pl.col("prefill_tokens") - computed
    changed = timeline.with_columns(
        pl.when(is_counted).then(value).otherwise(name).alias(name)
        for name, value in {"prefill_tokens": computed, "prefill_context_tokens": cached}.items()
    )
    return msgspec.structs.replace(tables, timeline=changed)


def prompts_of(rows: pl.DataFrame) -> Flags:
    """Return which rows compute prompts; shape (n,)."""
    return np.asarray(rows["of_num_prefill_reqs"].to_numpy() > 0)


def thinned(rows: pl.DataFrame) -> pl.DataFrame:
    """Return at most `MOST_LAW_ROWS` rows of each phase, evenly in their order."""
    if rows.height <= MOST_LAW_ROWS:
        return rows
    chosen = []
    for here in (prompts_of(rows), ~prompts_of(rows)):
        index = np.flatnonzero(here)
        kept = np.linspace(0, len(index) - 1, min(len(index), MOST_LAW_ROWS)).astype(np.int64)
        chosen.append(index[kept])
    return rows[np.sort(np.concatenate(chosen))]


# -- the law ---------------------------------------------------------------------------------------------


class Law(msgspec.Struct, frozen=True):
    """Coefficients of the law.

    Attributes:
        terms: The terms that were offered.
        coefficients: Their values, in order.
        form: Whether memory and compute add up, or the longer one counts.
        loss: Mean of the robust loss on the rows it was fitted to.
    """

    terms: tuple[LawTerm, ...]
    coefficients: tuple[float, ...]
    form: LawForm = "sum"
    loss: float = 0.0

    def value(self, name: str) -> float:
        """Return the coefficient of a term; 0 if it was not offered."""
        return next((c for t, c in self.pairs() if t.feature.name == name), 0.0)

    def pairs(self) -> Iterator[tuple[LawTerm, float]]:
        """Yield the terms with their coefficients."""
        return zip(self.terms, self.coefficients, strict=True)

    def predict(self, rows: pl.DataFrame) -> Vector:
        """Return the times of rows in us; shape (n,)."""
        sums = {
            part: sum(
                (c * rows[t.feature.name].to_numpy() for t, c in self.pairs() if part_of(t, self.form) == part),
                np.zeros(rows.height),
            )
            for part in (OVERHEAD, MEMORY, COMPUTE, LAUNCH)
        }
        return np.maximum(sums[OVERHEAD] + np.maximum(sums[MEMORY], sums[COMPUTE]), sums[LAUNCH])


def part_of(term: LawTerm, form: LawForm) -> Part:
    """Return the sum that a term is in."""
    return term.of if form == "longer" or term.of == LAUNCH else "always"  # type: ignore[return-value]


LAW_FORMS: tuple[LawForm, ...] = ("sum", "longer")
_LONGER_LOSS = 0.7
"""Share of the loss of a sum below which the longer of memory and compute is taken instead: the sum holds on most real
GPUs."""


def offered(kind: Kind, form: LawForm) -> tuple[LawTerm, ...]:
    """Return the terms of a transfer: a sum has the FLOPs of decoding only where the sources are of one model and GPU.

    Elsewhere that term takes up costs per request, which then scale with the wrong specification.
    """
    return tuple(t for t in LAW_TERMS if kind == "tensor_parallel" or form == "longer" or not t.same_server)


def fit_law(parts: Sequence[LawRows], kind: Kind, wider: Sequence[Wider] = ()) -> Law:
    """Fit the law to the steps of some servers, which count the same each, in the form that explains them.

    Args:
        parts: The servers.
        kind: Property by which the server that the law is for differs from them.
        wider: Servers less like it, the least alike first: the law of each is the prior of the next.
    """
    law: Law | None = None
    for step in (*wider, Wider(kind, tuple(parts))):
        law = _fit_law(step, law) if step.sources else law
    if law is None:
        raise ValueError("a law needs servers")
    return law


def _fit_law(step: Wider, found: Law | None) -> Law:
    frames = [thinned(part.rows) for part in step.sources]
    weights = np.concatenate([_weights(prompts_of(frame)) for frame in frames])
    rows, strength = pl.concat(frames), STRENGTH / len(frames) ** 2
    added, longer = (
        fitted_law(rows, weights, _expecting(offered(step.kind, form), found), strength, form) for form in LAW_FORMS
    )
    return longer if longer.loss < _LONGER_LOSS * added.loss else added


def _expecting(terms: tuple[LawTerm, ...], found: Law | None) -> tuple[LawTerm, ...]:
    """Return the terms with the coefficients of a law as priors, those that it has."""
    priors = {} if found is None else {t.feature.name: c for t, c in found.pairs()}
    return tuple(msgspec.structs.replace(t, prior=priors.get(t.feature.name, t.prior)) for t in terms)


def fitted_law(
    rows: pl.DataFrame,
    weights: Vector,
    terms: tuple[LawTerm, ...],
    strength: float,
    form: LawForm = "sum",
    prior: Law | None = None,
) -> Law:
    """Fit the law to rows.

    Args:
        rows: The terms of the law, and `y` in us.
        weights: Weight of each row, shape (n,).
        terms: The terms to offer.
        strength: Strength of the Ridge towards the priors.
        form: How memory and compute share a step.
        prior: Law whose coefficients are the priors; those of the terms if not given.
    """
    priors = [t.prior if prior is None else prior.value(t.feature.name) for t in terms]
    # A coefficient that was found on others is known to a share of itself.
    scales = [t.scale if prior is None else max(p, _OWN_SCALE * t.scale) for t, p in zip(terms, priors, strict=True)]
    law = LawRegressor(
        low=[t.low for t in terms],
        high=[t.high for t in terms],
        prior=priors,
        scale=scales,
        part=[part_of(t, form) for t in terms],
        alike=[t.alike for t in terms],
        strength=strength,
    )
    law.fit(matrix(rows, [t.feature.name for t in terms]), target_of(rows), weights)
    return Law(terms, tuple(float(c) for c in law.coef_), form, law.loss_)


_OWN_SCALE = 0.3


def _weights(prompts: Flags) -> Vector:
    """Return the weights of a server's steps, which add up to 1: those with prompts have at least `PROMPT_SHARE` of
    it.
    """
    count, n = int(prompts.sum()), len(prompts)
    if not 0 < count < PROMPT_SHARE * n:
        return np.full(n, 1 / n)
    return np.where(prompts, PROMPT_SHARE / count, (1 - PROMPT_SHARE) / (n - count))


# -- sources ---------------------------------------------------------------------------------------------


class Wider(NamedTuple):
    """Servers that are less like a new one than its sources are.

    Attributes:
        kind: Property in which all of them differ from it: those of other models are on the same GPU, those of other
            GPUs may be of its model.
        sources: The servers.
    """

    kind: Kind
    sources: tuple[LawRows, ...]

    def without_model(self, context: RunContext) -> Self:
        """Return those of other models than a server's, in whatever precision."""
        shape = _shape_of(context)
        return self._replace(sources=tuple(one for one in self.sources if _shape_of(one.context) != shape))


class Chosen(NamedTuple):
    """The sources of a transfer.

    Attributes:
        kind: Property of the new server that none of them has.
        sources: The servers that its law is fitted to.
        wider: The other servers, the least alike first.
    """

    kind: Kind
    sources: tuple[LawRows, ...]
    wider: tuple[Wider, ...] = ()


def choose_sources(target: RunContext, sources: Sequence[LawRows]) -> Chosen:
    """Choose the sources of a transfer to a server; see the module."""
    on_gpu, off_gpu = _parted(sources, "gpu", target)
    same, others = _parted(on_gpu, "model", target)
    if same:
        return Chosen("tensor_parallel", same, (Wider("gpu", off_gpu), Wider("model", others)))
    return Chosen("model", on_gpu, (Wider("gpu", off_gpu),)) if on_gpu else Chosen("gpu", off_gpu)


def _parted(sources: Sequence[LawRows], kind: Kind, target: RunContext) -> tuple[tuple[LawRows, ...], ...]:
    """Return the sources that are like the target in what a kind tells apart, and the others."""
    like = [one.group(kind) == group_of(target, kind) for one in sources]
    return tuple(tuple(one for one, yes in zip(sources, like, strict=True) if yes is side) for side in (True, False))


def parts_of_model(context: RunContext) -> tuple[str, ...]:
    """Return the kinds of layers and the precisions of a server's model, and whether its experts are divided, each as a
    phrase.
    """
    model = context.architecture
    if model is None:
        return ()
    found = dict.fromkeys(kind for attention in model.attentions for kind in _kinds_of(attention))
    found |= dict.fromkeys(f"layers with a {state.kind} state" for state in model.states)
    sizes = {"attention weights": model.attention_weight_bytes, "a KV cache": model.kv_bytes}
    if model.dense_layers:
        found |= {_DENSE: None}
        sizes["dense weights"] = model.ffn_weight_bytes
    if model.is_moe:
        found |= {"layers with experts": None}
        sizes["experts"] = model.expert_weight_bytes
        ranks = (context.settings.tensor_parallel or 1) * (context.settings.data_parallel or 1)
        if context.settings.enable_expert_parallel and ranks > 1:
            found |= {"expert parallelism": None}
    return (*found, *(f"{what} of {8 * size:g} bits" for what, size in sizes.items()))


def _kinds_of(attention: Attention) -> Iterator[str]:
    if attention.latent is not None:
        yield "latent attention"
    else:
        yield _ATTENTION if attention.window is None else "attention in a window"
    if attention.indexer is not None:
        yield "an indexer of attention"


_ATTENTION, _DENSE = "attention", "dense feed-forward layers"


def unseen_parts(target: RunContext, seen: Collection[str]) -> tuple[str, ...]:
    """Return the parts of a server that are in none of its sources, which have those `seen`."""
    # A dense layer is matrices, as attention is, and its weights are as wide.
    like = {_DENSE: _ATTENTION} | {part.replace("attention", "dense"): part for part in seen}
    return tuple(part for part in parts_of_model(target) if part not in seen and like.get(part, "") not in seen)


# -- leaving out -----------------------------------------------------------------------------------------


class Fold(msgspec.Struct, frozen=True):
    """A deployment that was left out, with the errors of a law that was fitted on others.

    Attributes:
        left_out: The tensor parallelism, model or GPU that was left out.
        deployment_id: The deployment.
        trained_on: Deployments that the law was fitted on.
        law: Its coefficients.
        errors: Errors on the steps of the deployment.
        by_phase: The same, by phase.
        ape_pct: Absolute errors of each step in percent, by phase.
        bias_log: Logarithm of the measured sum over the predicted one.
        nearest: Errors of the law of only the nearest source with that source's numbers: its time for this batch,
            unchanged.
        roofline: Errors of the longer of compute and memory at the rated speed.
        coverage_pct: Percent of its steps within the interval that the other sources give; null where these are too few
            for one.
    """

    left_out: str
    deployment_id: str
    trained_on: tuple[str, ...]
    law: Law
    errors: Metrics
    by_phase: dict[str, Metrics]
    ape_pct: dict[str, Vector]
    bias_log: float
    nearest: Metrics
    roofline: Metrics
    coverage_pct: float | None = None


def leave_out(
    sources: Sequence[LawRows], kind: Kind, wider: Sequence[Wider] = (), *, nested: bool = True
) -> tuple[Fold, ...]:
    """Leave each tensor parallelism, model or GPU out in turn; none where all sources are of one.

    Args:
        sources: The sources of a transfer of this kind.
        kind: The property by which sources are left out.
        wider: The servers less like the new one; a model that is left out is left out of them too.
        nested: Also measure simpler answers, and the coverage of the interval that the other folds give.
    """
    groups = dict.fromkeys(one.group(kind) for one in sources)
    if len(groups) < 2:
        return ()
    folds = []
    for group in groups:
        rest = [one for one in sources if one.group(kind) != group]
        left = [one for one in sources if one.group(kind) == group]
        beyond = [step.without_model(left[0].context) for step in wider] if kind == "model" else wider
        law = fit_law(rest, kind, beyond)
        inner = errors_of(leave_out(rest, kind, beyond, nested=False)) if nested else None
        folds += [_fold(one, rest, law, kind, inner) for one in left]
    return tuple(folds)


def _fold(one: LawRows, rest: Sequence[LawRows], law: Law, kind: Kind, inner: TransferErrors | None) -> Fold:
    actual, predicted, prompts = target_of(one.rows), law.predict(one.rows), prompts_of(one.rows)
    phases = {name: here for name, here in _phases(prompts) if here.any()}
    ape = 100 * np.abs(predicted - actual) / actual
    covered = None
    # The widest interval is given where nothing is tested: that it holds says nothing.
    if inner is not None and inner.folds:
        covered = float(100 * (ape <= np.where(prompts, inner.of(PROMPTS), inner.of(DECODES))).mean())
    return Fold(
        name_of(one.context, kind),
        one.deployment_id,
        tuple(r.deployment_id for r in rest),
        law,
        measure(actual, predicted),
        {name: measure(actual[here], predicted[here]) for name, here in phases.items()},
        {name: ape[here] for name, here in phases.items()},
        math.log(float(actual.sum()) / max(float(predicted.sum()), 1e-9)),
        NO_ROWS if inner is None else measure(actual, unchanged(one, nearest(one.context, rest))),
        NO_ROWS if inner is None else measure(actual, roofline(one.rows)),
        covered,
    )


def _phases(prompts: Flags) -> tuple[tuple[str, Flags], ...]:
    return ((DECODES, ~prompts), (PROMPTS, prompts))


def nearest(target: RunContext, sources: Sequence[LawRows]) -> LawRows:
    """Return the source whose GPUs have the most similar weights to read, each at its own speed."""

    def read_us(context: RunContext) -> float:
        model, gpu = context.architecture, context.gpu
        if model is None or gpu is None:
            return 1.0
        ranks = (context.settings.tensor_parallel or 1) * (context.settings.pipeline_parallel or 1)
        return model.weight_bytes / ranks / gpu.memory_bandwidth_gb_s

    wanted = read_us(target)
    return min(sources, key=lambda one: abs(math.log(read_us(one.context) / wanted)))


def unchanged(one: LawRows, source: LawRows) -> Vector:
    """Return the times of a source for the batches of another server: its own law, with its own numbers."""
    return fit_law([source], "tensor_parallel").predict(as_run_by(one.rows, source.context))


def as_run_by(rows: pl.DataFrame, context: RunContext) -> pl.DataFrame:
    """Return the law's terms of batches of one server as another server would run them."""
    batches = rows.select(pl.col(f"of_{name}").alias(name) for name in LAW_BATCH_COLUMNS)
    return add_features(with_law(batches, context), LAW_SET, {})


def roofline(rows: pl.DataFrame) -> Vector:
    """Return the longer of compute and memory at the rated speed, in us; shape (n,)."""
    memory = sum(rows[n].to_numpy() for n in ("weight_read_us", "moe_expert_read_us", "decode_kv_read_us"))
    compute = sum(rows[n].to_numpy() for n in ("prompt_matrix_us", "prompt_attention_us", "decode_matrix_us"))
    return np.asarray(np.maximum(memory, compute))


class TransferErrors(NamedTuple):
    """Errors that a transfer is expected to have, from its folds.

    Attributes:
        p90_ape_pct: Phase to the error that nine of ten steps keep to.
        sd_log: Standard deviation of the logarithm of a server's mean step time over the predicted one.
        folds: Number of groups that were left out.
    """

    p90_ape_pct: dict[str, float]
    sd_log: float
    folds: int

    def of(self, phase: str) -> float:
        """Return the error of a phase; that of the other one where no fold has such steps."""
        return self.p90_ape_pct.get(phase, max(self.p90_ape_pct.values()))


UNTESTED = TransferErrors({DECODES: 50.0, PROMPTS: 80.0}, math.log(1.5) / 1.645, 0)
"""The widest interval, for a transfer that no fold tests: the worst unseen kind of model was 40 to 50 % off, its
prompts more."""


def errors_of(folds: Sequence[Fold]) -> TransferErrors:
    """Return the errors to expect: of all folds together from five on, each counting the same, else of the worst.

    A spread of few numbers is itself uncertain: its standard deviation is at least the largest of them over 1.645, so
    that the 90 % interval holds the worst.
    """
    if not folds:
        return UNTESTED
    limits: dict[str, float] = {}
    groups = len({fold.trained_on for fold in folds})
    for phase in PHASES:
        of_phase = [fold.ape_pct[phase] for fold in folds if phase in fold.ape_pct]
        if of_phase and groups >= FEWEST_FOLDS:
            limits[phase] = _quantile(of_phase)
        elif of_phase:
            limits[phase] = max(float(np.quantile(ape, TRANSFER_LEVEL_PCT / 100)) for ape in of_phase)
    biases = np.array([fold.bias_log for fold in folds])
    spread = float(np.sqrt((biases**2).mean()))
    worst = float(np.abs(biases).max()) / 1.645
    return TransferErrors(limits, spread if groups >= FEWEST_FOLDS else max(spread, worst), groups)


def _quantile(groups: Sequence[Vector]) -> float:
    """Return the 90th percentile of values in groups that count the same."""
    weights = np.concatenate([np.full(len(group), 1 / len(group)) for group in groups])
    return float(np.quantile(np.concatenate(groups), TRANSFER_LEVEL_PCT / 100, weights=weights, method="inverted_cdf"))


# -- calibration -----------------------------------------------------------------------------------------


class Calibration(msgspec.Struct, frozen=True):
    """The law after a few steps of the new server.

    Attributes:
        law: The coefficients that are used.
        used: Whether they were drawn to these steps: left-out blocks of these are predicted better so.
        rows: The steps, without warm-up and compilation.
        left_out: Steps that are left out, by reason.
        before: Errors of the transferred law on the steps.
        after: Errors of calibrated laws on blocks of the steps that each was not fitted on.
        by_phase: The errors of the law that is used, by phase.
        errors: The errors to expect of it.
    """

    law: Law
    used: bool
    rows: LawRows
    left_out: dict[str, int]
    before: Metrics
    after: Metrics
    by_phase: dict[str, Metrics]
    errors: TransferErrors

    @property
    def error_pct(self) -> float:
        """Mean absolute error in percent of the law that is used."""
        return (self.after if self.used else self.before).mape_pct or 0.0


def calibrate(law: Law, steps: LawRows, expected: TransferErrors, *, fewest: int = FEWEST_STEPS) -> Calibration | None:
    """Draw the law to steps of the new server, or to its points, as far as blocks of them that are left out confirm it.

    Returns:
        Null where fewer than `fewest` are left.
    """
    kept, compiling = _settled(law, steps.rows)
    if kept.height < fewest:
        return None
    rows, actual, prompts = thinned(kept), None, None
    actual, prompts = target_of(rows), prompts_of(rows)
    before, after = law.predict(rows), np.zeros(rows.height)
    block = np.arange(rows.height) * _CALIBRATION_BLOCKS // rows.height
    for k in range(_CALIBRATION_BLOCKS):
        # Blocks in time, not every fifth step: neighbours are alike, and would confirm whatever they were fitted with.
        after[block == k] = drawn(law, rows.filter(block != k)).predict(rows.filter(block == k))
    measured = measure(actual, before), measure(actual, after)
    used = (measured[1].mape_pct or 0.0) < (measured[0].mape_pct or 0.0)
    predicted = after if used else before
    by_phase = {name: measure(actual[here], predicted[here]) for name, here in _phases(prompts) if here.any()}
    limits = dict(expected.p90_ape_pct)
    for name, errors in by_phase.items():
        if errors.p90_ape_pct is not None and (used or errors.n >= _FEWEST_SINGLE):
            limits[name] = errors.p90_ape_pct
    sums = [(actual[block == k].sum(), predicted[block == k].sum()) for k in range(_CALIBRATION_BLOCKS)]
    logs = [math.log(float(a) / max(float(p), 1e-9)) for a, p in sums if a > 0]
    spread = max(abs(x) for x in logs) / 1.645
    left_out = {**steps.left_out, **({COMPILING: compiling} if compiling else {})}
    return Calibration(
        drawn(law, rows) if used else law,
        used,
        LawRows(steps.deployment, rows, left_out),
        left_out,
        *measured,
        by_phase,
        TransferErrors(limits, spread, expected.folds),
    )


def drawn(law: Law, rows: pl.DataFrame) -> Law:
    """Return the law drawn from its coefficients to some steps."""
    weights = np.full(rows.height, 1 / max(rows.height, 1))
    return fitted_law(rows, weights, law.terms, CALIBRATION_STRENGTH / max(rows.height, 1), law.form, law)


def _settled(law: Law, rows: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return the rows without those that took far longer than others of their phase, and how many these are."""
    if not rows.height:
        return rows, 0
    ratio = target_of(rows) / np.maximum(law.predict(rows), 1e-9)
    slow = np.zeros(rows.height, dtype=bool)
    for _, here in _phases(prompts_of(rows)):
        if here.any():
            slow |= here & (ratio > _COMPILING * np.median(ratio[here]))
    return rows.filter(~slow), int(slow.sum())
