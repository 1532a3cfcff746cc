"""Export to Dynamo's mocker: one .npz with grids of step times in ms, on which the step model is evaluated.

The mocker interpolates linearly and extrapolates beyond the grid: prefill_ttft_ms over the new tokens of a step,
decode_itl over (tokens in all caches, tokens per request). A step with prefill and decode takes the sum of the two.
"""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.consumers.base import (
    OUT,
    Export,
    Source,
    block_size,
    flags,
    held_out,
    kv_blocks,
    model_name,
    train_and_holdout,
    worse_than_baseline,
)
from tracefit.models.frames import evaluated_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.results.models import HeldOut
    from tracefit.statistics import Matrix, Vector

GRID_POINTS = 33
"""Points of each axis."""

COLUMNS = (
    "prefill_tokens",
    "decode_tokens",
    "context_tokens",
    "num_decode_reqs",
    "num_prefill_reqs",
    "running_depth",
)
"""Columns of a step that the grids and their errors are made from."""


def to_dynamo(source: Source) -> Export:
    """Evaluate the step model on the grids that the training steps span.

    Raises:
        DataError: The data cannot support it, with the reason.
    """
    train, holdout = train_and_holdout(source, source.steps(COLUMNS), COLUMNS, "step times")
    # The sum of both grids counts the constant of a step twice in a mixed step: where mixed steps are the rule, prefill
    # leaves it out.
    prefills = train.filter(pl.col("prefill_tokens") > 0)
    mixed = prefills.filter(pl.col("num_decode_reqs") > 0).height
    is_rule = mixed > prefills.height - mixed
    constant = float(predicted_ms(source, pl.DataFrame({"batch": [0.0]}))[0]) if is_rule else 0.0
    grids = grids_of(source, train, constant)
    holds = "leaves the constant of a step to" if constant else "holds the constant of a step, as does"
    counts = f"{mixed} of {prefills.height} training steps with prompts decode too"
    errors = errors_of(grids, train, holdout)
    notes = (
        (
            f"a step that prefills and decodes takes the sum: prefill_ttft_ms {holds} decode_itl, {constant:.3f} ms "
            f"({counts})"
        ),
        "prompt tokens computed before, and prefill requests beyond the first, are not in its grids",
        "--model-path is where the mocker gets its tokenizer: the model's name, or a folder",
        *worse_than_baseline(errors),
    )
    usage = f"python -m dynamo.mocker {_server_flags(source)}"
    return Export({"perf_data.npz": _npz(grids)}, errors, notes, usage)


def _server_flags(source: Source) -> str:
    """Return the flags of the traced server; the mocker's defaults are 256 sequences, 8,192 tokens, blocks of 64."""
    settings = source.deployment.context.settings
    values = {
        "model-path": model_name(source),
        "planner-profile-data": f"{OUT}/perf_data.npz",
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "block-size": block_size(source),
        "num-gpu-blocks-override": kv_blocks(source),
    }
    switches = {
        "enable-prefix-caching": settings.enable_prefix_caching,
        "enable-chunked-prefill": settings.enable_chunked_prefill,
    }
    off = "".join(f" --no-{name}" for name, on in switches.items() if on is False)
    return flags(values) + off


def grids_of(source: Source, train: pl.DataFrame, constant_ms: float) -> dict[str, Vector | Matrix]:
    """Evaluate the model on the range of the training steps; `constant_ms` is subtracted from prefill."""
    isl, active, context = axes(train)
    batch = active[:, None] / context[None, :]
    points = pl.DataFrame({"batch": batch.ravel(), "context": np.broadcast_to(context, batch.shape).ravel()})
    itl = predicted_ms(source, points)
    ttft = np.maximum(predicted_ms(source, pl.DataFrame({"prefill": isl})) - constant_ms, 0.0)
    return {
        "prefill_isl": isl,
        "prefill_ttft_ms": ttft,
        "decode_active_kv_tokens": active,
        "decode_context_length": context,
        "decode_itl": itl.reshape(batch.shape),
    }


def axes(train: pl.DataFrame) -> tuple[Vector, Vector, Vector]:
    """Return prompt tokens, tokens in the caches of a batch and those of one request, over the range of the training
    steps.

    Each rises strictly, whatever the steps: the mocker divides by the width of a cell.
    """
    # polars types an extreme as any scalar a column can hold; these columns are numbers.
    most_prefill = max(float(train["prefill_tokens"].max()), 2.0)  # type: ignore[arg-type]
    decode = train.filter(pl.col("num_decode_reqs") > 0)
    each = decode.select(mean=pl.col("context_tokens") / pl.col("num_decode_reqs"))["mean"]
    low, high = max(float(each.min() or 1.0), 1.0), max(float(each.max() or 2.0), 2.0)  # type: ignore[arg-type]
    most_kv = max(float(decode["context_tokens"].max() or 2.0), 2.0)  # type: ignore[arg-type]
    isl = np.linspace(1.0, most_prefill, GRID_POINTS)
    active = np.linspace(low, max(most_kv, low + 1), GRID_POINTS)
    # The batch is active / context, which bends most at short contexts: geometric spacing puts more points there.
    context = np.geomspace(low, max(high, low + 1), GRID_POINTS)
    return isl, active, context


def predicted_ms(source: Source, described: pl.DataFrame) -> Vector:
    """Return the step model's times in ms of described steps, shape (n,)."""
    # Other inputs come from the training steps, as in `predict`.
    return evaluated_steps(source.models, described)["predicted_us"].to_numpy() / 1e3


def _npz(arrays: Mapping[str, Vector | Matrix]) -> bytes:
    """Write what `np.savez` writes, without the time of day in it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array, dtype=np.float64), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
    return packed.getvalue()


def errors_of(grids: Mapping[str, Vector | Matrix], train: pl.DataFrame, holdout: pl.DataFrame) -> tuple[HeldOut, ...]:
    """Return the errors of the grids, as the mocker reads them, on held-out steps of each kind."""
    y, trained = (part["y"].to_numpy() / 1e3 for part in (holdout, train))
    predicted = _mocked(grids, holdout)
    prefill, decode = (holdout[c].to_numpy() > 0 for c in ("prefill_tokens", "num_decode_reqs"))
    kinds = {
        "decode": decode & ~prefill,
        "prefill": prefill & ~decode,
        "prefill and decode": prefill & decode,
    }
    return tuple(
        held_out(f"step time, {kind}", "ms", y[rows], predicted[rows], trained)
        for kind, rows in kinds.items()
        if rows.any()
    )


def _mocked(grids: Mapping[str, Vector | Matrix], steps: pl.DataFrame) -> Vector:
    """Return the mocker's step times in ms, shape (n,).

    Args:
        grids: The arrays of the .npz by name.
        steps: prefill_tokens, num_decode_reqs and context_tokens of every step.
    """
    tokens = steps["prefill_tokens"].to_numpy().astype(float)
    batch = steps["num_decode_reqs"].to_numpy().astype(float)
    active = steps["context_tokens"].to_numpy().astype(float)
    isl, ttft = grids["prefill_isl"], grids["prefill_ttft_ms"]
    left, share = _cell(isl, tokens)
    prefill = np.maximum(ttft[left] * (1 - share) + ttft[left + 1] * share, 0.0)
    i, u = _cell(grids["decode_active_kv_tokens"], active)
    j, v = _cell(grids["decode_context_length"], active / np.maximum(batch, 1.0))
    itl = grids["decode_itl"]
    below, above = (itl[i + k, j] * (1 - v) + itl[i + k, j + 1] * v for k in (0, 1))
    decode = np.maximum(below * (1 - u) + above * u, 1.0)  # the mocker's floor, in ms
    return np.asarray(np.where(tokens > 0, prefill, 0.0) + np.where(batch > 0, decode, 0.0))


def _cell(axis: Vector, at: Vector) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], Vector]:
    """Return the index of each value's cell, the outermost one beyond the axis, and its relative position in the
    cell.
    """
    left = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    return left, (at - axis[left]) / (axis[left + 1] - axis[left])
