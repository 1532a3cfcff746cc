"""Shared by all consumer modules: the types `Source` and `Export`, and helpers for writing and evaluating.

A consumer is a program that loads latency coefficients such as a simulator. Its module is a function
from a `Source` (models and training tables of one deployment) to an `Export` (files, errors, how to load them), listed
by name in `consumers.CONSUMERS`.
"""

from __future__ import annotations

import json
import shlex
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.errors import DataError, printable
from tracefit.features.sets import Feature, FeatureSet
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS, counted_rows, split_by_time, step_frame
from tracefit.fit.validation import measure
from tracefit.replay.closed_loop import block_tokens
from tracefit.results.models import HeldOut
from tracefit.server.settings import ALL_SPANS, DEFAULT_BLOCK_SIZE, JOURNEY_FLAGS
from tracefit.tables.schema import ENGINE
from tracefit.tables.sources import is_one_step
from tracefit.timeline.step_sums import StepSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tracefit.fit.fitted import DeploymentTables
    from tracefit.models.deployment import DeploymentModels
    from tracefit.server.context import Deployment
    from tracefit.statistics import Vector

OUT = "{out}"
"""Stands for the folder of an export in its `usage` and its notes until the folder is chosen."""


class Source(msgspec.Struct, frozen=True, dict=True):
    """One deployment's coefficient models, the tables they were trained on, and the consumer's version, as the user
    gave it.
    """

    models: DeploymentModels
    read: Callable[[], tuple[Deployment, DeploymentTables]]
    consumer_version: tuple[int, ...] | None = None

    @cached_property
    def _trained_on(self) -> tuple[Deployment, DeploymentTables]:
        # Read when first used: a consumer whose form needs no refit takes only the coefficient files.
        return self.read()

    @property
    def has_read(self) -> bool:
        """Whether the tables were needed."""
        return "_trained_on" in self.__dict__

    @property
    def deployment(self) -> Deployment:
        """The deployment as its tables describe it."""
        return self._trained_on[0]

    @property
    def tables(self) -> DeploymentTables:
        """The tables that the models were trained on."""
        return self._trained_on[1]

    def steps(self, columns: Iterable[str], timeline: pl.DataFrame | None = None) -> pl.DataFrame:
        """Return the rows of `fit.splits.step_frame` with columns of the timeline, or of another one, as they are."""
        target = self.models.step_model.target
        # Step times of the source that the coefficient file states.
        source = "duration" if target is not None and target.source == "duration" else "clock"
        features = FeatureSet("columns", tuple(Feature(name, "", name) for name in columns))
        timeline = self.tables.timeline if timeline is None else timeline
        return step_frame(self.tables, timeline, features, {}, source)


class Export(msgspec.Struct, frozen=True):
    """Files for a consumer, with the error of exactly what is in them.

    Attributes:
        files: File name to content.
        errors: Held-out errors of the exported form.
        notes: Limits and assumptions that a user has to know.
        usage: A command that loads the files and runs as it is, with `OUT` for their folder.
    """

    files: dict[str, str | bytes]
    errors: tuple[HeldOut, ...]
    notes: tuple[str, ...] = ()
    usage: str = ""


def held_out(what: str, unit: str, actual: Vector, predicted: Vector, trained: Vector) -> HeldOut:
    """Return the errors of an exported form.

    Args:
        what: The quantity, in the consumer's words.
        unit: Unit of the arrays.
        actual: Measured, shape (n,).
        predicted: Predictions of the consumer's formula with the exported numbers, shape (n,).
        trained: Measured values of the training rows, of any shape.
    """
    errors = measure(actual, predicted)
    baseline = measure(actual, np.full(len(actual), float(np.median(trained))))
    return HeldOut(what, unit, errors.n, errors.mape_pct, errors.mae, errors.bias_pct, baseline.mae)


def train_and_holdout(
    source: Source, rows: pl.DataFrame, columns: Sequence[str], what: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the training and the held-out rows in which no column is null.

    Held-out intervals are left out where there are enough single steps.

    Raises:
        DataError: Either part has too few rows.
    """
    if unknown := [c for c in columns if rows[c].null_count() == rows.height]:
        lacking = ", ".join(unknown) if rows.height else "no row has both ends"
        events = f"the events of every request would show it: {JOURNEY_FLAGS}"
        hint = ALL_SPANS if source.tables.is_stock else events
        raise DataError(f"{what}: not known in these runs ({lacking})", hint=hint)
    complete = rows.drop_nulls(["y", *columns])
    train, holdout = counted_rows(complete, "train"), counted_rows(complete, "holdout")
    # An interval is a mean of steps, whose error is smaller than a step's: where there are enough steps, these are
    # evaluated.
    if "source" in holdout.columns:
        single = holdout.filter(is_one_step())
        holdout = single if single.height >= MIN_HOLDOUT_ROWS else holdout
    if train.height < MIN_TRAIN_ROWS or holdout.height < MIN_HOLDOUT_ROWS:
        raise DataError(
            f"{what}: {train.height} training and {holdout.height} held-out rows are too few",
            hint=f"{MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed: trace a longer run",
        )
    return train, holdout


def timed_requests(source: Source, target: str) -> pl.DataFrame:
    """Return the requests whose duration `target` is known, split by time, with the load they ran under.

    Returns:
        The `requests` table with `y` in us, ts_ns (first scheduled), uncached_tokens, and the running requests when
        each was first scheduled (running_start) and, on average, while it decoded (running_decode); null if unknown.
    """
    running = pl.col("running_depth").cast(pl.Float64)
    steps = source.tables.timeline.select(*ENGINE, "step_id", running=running)
    computed = pl.col("prompt_tokens") - pl.col("cached_prompt_tokens").fill_null(0)
    rows = source.tables.requests.with_columns(
        y=pl.col(target).cast(pl.Float64),
        ts_ns=pl.col("first_scheduled_ns"),
        uncached_tokens=computed.cast(pl.Float64),
        excluded_reason=pl.lit(None, pl.String),
    )
    start = steps.rename({"step_id": "first_scheduled_step", "running": "running_start"})
    rows = rows.join(start, on=[*ENGINE, "first_scheduled_step"], how="left", maintain_order="left")
    first, last = pl.col("first_token_step"), pl.col("finished_step")
    decode = StepSums(steps, "running").between(rows, first, last, missing="unknown")["running"]
    rows = rows.with_columns(running_decode=pl.when(last > first).then(decode / (last - first)))
    return split_by_time(rows.filter((pl.col("y") > 0) & pl.col("ts_ns").is_not_null()))


def number(value: float) -> str:
    """Write a number for a consumer's file: six significant digits, never in exponent form."""
    # YAML 1.1 reads 1e-05 as text.
    text = format(Decimal(f"{value:.6g}"), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text or "0"


def written(value: float) -> float:
    """Return a number rounded as `number` writes it, so that errors are those of the numbers in the file."""
    return float(number(value))


def model_name(source: Source) -> str:
    """Return the model's name on the server."""
    context = source.deployment.context
    named = context.architecture.name if context.architecture else None
    return context.settings.model or named or "unknown/model"


def flags(values: Mapping[str, str | float | None]) -> str:
    """Write command-line options, quoted for a shell; an option of None is left out."""
    given = {name: str(value) for name, value in values.items() if value is not None}
    # A value that begins like an option would be read as one.
    return " ".join(f"--{name}{'=' if value.startswith('-') else ' '}{_quoted(value)}" for name, value in given.items())


def _quoted(value: str) -> str:
    # The folder is put in later, and quoted then.
    folder = OUT if value.startswith(OUT) else ""
    return folder + shlex.quote(value.removeprefix(OUT))


def worse_than_baseline(errors: Iterable[HeldOut]) -> tuple[str, ...]:
    """Return a note that names the exported forms with a larger hold-out error than the training median, if there are
    any.
    """
    worse = [
        f"{e.what} ({e.mae:,.4g} {e.unit} against {e.baseline_mae:,.4g})"
        for e in errors
        if e.mae is not None and e.baseline_mae is not None and e.mae > e.baseline_mae
    ]
    note = "worse on the hold-out than the training median, exported because the form has no better one"
    return (f"{note}: {', '.join(worse)}",) if worse else ()


def commented(notes: Iterable[str], text: str) -> str:
    """Put notes above a YAML file as comments; each is one line."""
    return "".join(f"# {printable(note)}\n" for note in notes) + text


def yaml_text(value: str) -> str:
    """Write a text for a YAML file, so that every reader gets it back."""
    # Like JSON, but readers of YAML 1.1 take the two halves that JSON makes of a rare character for two characters, and
    # fold or refuse others.
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def block_size(source: Source) -> int:
    """Return the tokens of a KV block: as the run's files state them; else vLLM's default, or what the steps show
    instead.
    """
    settings = source.deployment.context.settings
    stated = settings.block_size or DEFAULT_BLOCK_SIZE
    if settings.block_size and settings.sources.get("block_size") != "assumed":
        return stated
    return block_tokens(source.tables.timeline.lazy(), kv_blocks(source), stated)


def kv_blocks(source: Source) -> int | None:
    """Return the KV blocks available to requests: as the steps state them, otherwise all but the one vLLM reserves."""
    # The number of the steps counts: it depends on the memory left after loading, which no option states.
    stated = source.tables.timeline["kv_blocks_total"].max()
    if isinstance(stated, int):
        return stated
    blocks = source.deployment.context.settings.num_gpu_blocks
    return blocks - 1 if blocks else None
