"""Steps of a server that was never traced, as its transferred model says, for consumers whose form has to be
refitted.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import tracefit.recordings  # noqa: F401 - declares the sources of recorded steps
from tracefit.errors import UsageError
from tracefit.fit.fitted import DeploymentTables
from tracefit.models.frames import evaluated_steps
from tracefit.server.context import context_from_json, deployment_of, gpu_to_json
from tracefit.server.documents import parse_json_object, read_bytes
from tracefit.server.settings import settings_to_json
from tracefit.tables.schema import TABLES
from tracefit.tables.sources import ADJACENT

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.models.deployment import DeploymentModels
    from tracefit.server.context import Deployment, RunContext

SERVER_FILE = "server.json"
"""Settings, config.json and GPU of a server that was never traced, as the `runs` table has them of a traced one."""

NOTE = (
    "fitted to the steps that the transferred model predicts, not to measured ones: the errors are only those of "
    "the form"
)

_DESCRIBED_RUN = "described"
_BATCHES, _CONTEXT_LENGTHS, _PROMPTS = 24, 5, 12
_UNKNOWN_SEQS, _UNKNOWN_TOKENS = 256, 2048
_MOST_CONTEXT = 8192


def server_text(context: RunContext) -> str:
    """Write a server as JSON."""
    texts = {
        "settings": settings_to_json(context.settings),
        "model_config": context.model_config,
        "gpu": gpu_to_json(context.gpu),
    }
    return json.dumps(texts, indent=2) + "\n"


def described_tables(models: DeploymentModels, folder: Path) -> tuple[Deployment, DeploymentTables]:
    """Return a server that was never traced, and a grid of its steps with the times that its model predicts.

    Raises:
        UsageError: The folder lacks the file that describes the server, or it is damaged.
    """
    path = folder / SERVER_FILE
    plain = parse_json_object(read_bytes(path), where=str(path), strict=True)
    texts = [plain.get(name) for name in ("settings", "model_config", "gpu")]
    if not isinstance(texts[0], str) or not all(text is None or isinstance(text, str) for text in texts):
        raise UsageError("does not describe a server", where=str(path), hint="`tracefit transfer` makes it")
    settings, config, gpu = (text if isinstance(text, str) else None for text in texts)
    deployment = deployment_of(context_from_json(settings or "{}", config, gpu, where=str(path)))
    return deployment, _tables(_grid(models, deployment))


def _grid(models: DeploymentModels, deployment: Deployment) -> pl.DataFrame:
    """Return steps over batch, context and prompt up to the limits of the server, in an order that any part of it
    covers, with `cycle_us`.
    """
    settings = deployment.context.settings
    seqs, budget = settings.max_num_seqs or _UNKNOWN_SEQS, settings.max_num_batched_tokens or _UNKNOWN_TOKENS
    longest = min(settings.max_model_len or _MOST_CONTEXT, _MOST_CONTEXT)
    batches = np.unique(np.geomspace(1, seqs, _BATCHES).astype(int))
    contexts = np.geomspace(16, longest, _CONTEXT_LENGTHS).astype(int)
    prompts = np.unique(np.geomspace(16, budget, _PROMPTS).astype(int))
    decodes = [(b, c, 0) for b, c in product(batches, contexts)]
    mixed = [(b, c, p) for p, b, c in product(prompts, (0, *batches[::6]), contexts[1::2]) if b + p <= budget]
    rows = np.array([*decodes, *mixed])
    # In an order by chance, that of a seed: the last part of the rows is held out.
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    batch, context, prefill = rows.T.astype(np.int64)
    steps = pl.DataFrame(
        {
            "num_prefill_reqs": np.minimum(prefill, 1),
            "num_decode_reqs": batch,
            "prefill_tokens": prefill,
            "decode_tokens": batch,
            "context_tokens": batch * context,
            "prefill_context_tokens": np.zeros(len(rows), dtype=np.int64),
            "running_depth": batch + np.minimum(prefill, 1),
            "waiting_depth": np.zeros(len(rows), dtype=np.int64),
        }
    )
    return steps.with_columns(cycle_us=evaluated_steps(models, steps)["predicted_us"])


def _tables(steps: pl.DataFrame) -> DeploymentTables:
    starts = (1e3 * np.concatenate([[0.0], np.cumsum(steps["cycle_us"].to_numpy())[:-1]])).astype(np.int64)
    timeline = pl.concat(
        [
            TABLES["timeline"].empty(),
            steps.with_columns(
                run_id=pl.lit(_DESCRIBED_RUN),
                server=pl.lit(_DESCRIBED_RUN),
                epoch=pl.lit(0),
                step_id=pl.int_range(1, steps.height + 1),
                ts_start_ns=pl.Series(starts),
                start_sd_us=pl.lit(0.0),
                cycle_sd_us=pl.lit(0.0),
                cycle_source=pl.lit(ADJACENT.name),
                composition_source=pl.lit("summary"),
                interval_steps=pl.lit(1),
                num_preempted=pl.lit(0),
                context_estimated=pl.lit(value=False),
                idle_before=pl.lit(value=False),
                idle_after=pl.lit(value=False),
            ),
        ],
        how="diagonal_relaxed",
    )
    counters = timeline.group_by("run_id", "server", "epoch").agg(
        first_step=pl.col("step_id").min(), last_step=pl.col("step_id").max()
    )
    return DeploymentTables(
        runs=TABLES["runs"].empty(),
        timeline=timeline,
        sampled_steps=timeline.height,
        requests=TABLES["requests"].empty(),
        queue=None,
        counters=counters,
        lags={(_DESCRIBED_RUN, _DESCRIBED_RUN): 0},
        requeue_waits=pl.DataFrame(),
        clock_checks=pl.DataFrame(),
    )
