"""Export to the fleet simulator of vLLM's semantic router (`vllm-sr-sim`): the constants of its `ManualProfile`.

Read in `fleet_sim/gpu_profiles/manual.py` of 0.1.0 (July 2026): a step takes W + H · n · (mean tokens of a sequence /
calibration_ctx) seconds with n sequences, whether it prefills or not.
"""

from __future__ import annotations

import json

import numpy as np
import polars as pl

from tracefit.consumers.base import (
    OUT,
    Export,
    Source,
    block_size,
    held_out,
    kv_blocks,
    model_name,
    train_and_holdout,
    worse_than_baseline,
    written,
)
from tracefit.errors import DataError
from tracefit.fit.estimators import fit_nonnegative
from tracefit.fit.fitted import matrix, target_of
from tracefit.options import ServerOptions, named

_FLEET_COLUMNS = ("num_decode_reqs", "num_prefill_reqs", "context_tokens")


def to_fleet_sim(source: Source) -> Export:
    """Fit W and H on all steps.

    Raises:
        DataError: The data cannot support it, with the reason.
    """
    settings, blocks = source.deployment.context.settings, kv_blocks(source)
    needed = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "KV blocks": blocks,
    }
    if missing := [name for name, value in needed.items() if not value]:
        raise DataError(
            f"the profile needs {', '.join(missing)}",
            hint=f"ingest the run again and name them with {named(ServerOptions, 'settings')}",
        )
    sequences = pl.col("num_decode_reqs") + pl.col("num_prefill_reqs")
    rows = source.steps(_FLEET_COLUMNS).with_columns(sequences=sequences.cast(pl.Float64))
    train, holdout = train_and_holdout(source, rows, [*_FLEET_COLUMNS, "sequences"], "step times")
    y, weights = target_of(train), train["interval_steps"].to_numpy().astype(float)
    x, later = (matrix(part, ["sequences"])[:, 0] for part in (train, holdout))
    fitted = fit_nonnegative(np.column_stack([np.ones(len(y)), x]), y, weights, huber=np.inf)
    w_s, h_s = (written(us / 1e6) for us in fitted)
    decoding = train.filter(pl.col("num_decode_reqs") > 0)
    context = float(decoding["context_tokens"].sum()) / max(float(decoding["num_decode_reqs"].sum()), 1.0)
    profile = {
        "name": model_name(source),
        "W": w_s,
        "H": h_s,
        "chunk": settings.max_num_batched_tokens,
        "blk_size": block_size(source),
        "total_kv_blks": blocks,
        "max_slots": settings.max_num_seqs,
        "cost_per_hr": 0.0,
        "calibration_ctx": max(round(context), 1),
    }
    predicted = 1e6 * (w_s + h_s * later)
    error = held_out("step time, by W and H", "us", target_of(holdout), predicted, y)
    notes = (
        "calibration_ctx is the mean context of a decoding request: the simulator scales H by the context of others",
        "cost_per_hr is 0: set it to yours",
        *worse_than_baseline((error,)),
    )
    code = "import json, sys; from fleet_sim import ManualProfile; print(ManualProfile(**json.load(open(sys.argv[1]))))"
    usage = f"python -c '{code}' {OUT}/profile.json"
    return Export({"profile.json": json.dumps(profile, indent=2) + "\n"}, (error,), notes, usage)
