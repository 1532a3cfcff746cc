"""Speed of a replay: requests with a million tokens through the scheduler, with the models of a folder, on one core.

    python tests/benchmarks/replay.py [--models fixtures/models] [--tokens 1000000] [--rate 10]

Prompts and outputs are drawn evenly from 50 to 350 tokens. Prints seconds of the processor per scope, and says where the limit of
two seconds for a million tokens does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from tracefit.coefficients.models import load
from tracefit.replay.engine import EngineSettings
from tracefit.replay.models import FittedStepTimes
from tracefit.replay.run import RequestLoad, replay

MOST_S_PER_MILLION = 2.0


def main() -> int:
    """Replay with the models of every scope."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path(__file__).parents[2] / "fixtures/models")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=10.0)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    prompt, output = (rng.integers(50, 350, options.tokens // 400) for _ in range(2))
    load_ = RequestLoad(np.cumsum(rng.exponential(1e6 / options.rate, len(prompt))), prompt, output)
    tokens = int(prompt.sum() + output.sum())
    slow = False
    models = load(options.models)
    for scope_id in models.scope_ids:
        scope = models.scope(scope_id)
        limits = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks")
        settings = EngineSettings(*(int(scope.server[name] or 0) for name in limits))
        times = FittedStepTimes(scope.step_model, scope.server)
        start = time.process_time()
        found = replay(load_, times, settings)
        took = time.process_time() - start
        steps = sum(len(stretch[0]) for stretch in found.steps[0])
        limit = MOST_S_PER_MILLION * tokens / 1e6
        slow |= took > limit
        print(
            f"{'MISS' if took > limit else 'ok  '} {scope_id}: {tokens:,} tokens in {took:.2f} s (at most {limit:.2f}), {steps:,} steps, {found.preemptions:,} preemptions"
        )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
