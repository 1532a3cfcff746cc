"""Time that tracefit-vllm takes on the engine's thread: `make bench-vllm`, with the Python of an environment that has
vLLM.

vLLM's own scheduler runs without a model, in turn with and without the plugin; its requests decode one token a step.
The times are CPU times of this thread, so that other programs on the machine do not count: of a whole step, and of only
the plugin's part of it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tracefit_vllm import Scheduler, recorder, scheduler
from vllm_server.real_server import write_model

STEPS = 200
ROUNDS = 4
BATCHES = (1, 8, 32, 128, 256)
BLOCK, BLOCKS = 16, 20_000
PARTS = ("begin", "scheduled", "wrong_drafts", "output")
"""Work of the plugin in each step."""


def make_config(folder):
    args = EngineArgs(model=str(write_model(folder / "model")), load_format="dummy", enforce_eager=True)
    args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens = 1024, 256, 4096
    args.enable_prefix_caching = False
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def make_scheduler(kind, config):
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=manager,
        block_size=BLOCK,
        log_stats=True,
    )


def run(kind, config, batch, number):
    """Return the CPU time of each step of a batch that decodes, in us."""
    engine = make_scheduler(kind, config)
    for one in range(batch):
        limits = SamplingParams(max_tokens=STEPS + 50, ignore_eos=True)
        name = f"cmpl-{number:08x}{one:024x}-0-{one:08x}"
        engine.add_request(Request(name, [5] * 12, limits, None))
    spent = []
    for step in range(STEPS):
        began = time.thread_time_ns()
        output = engine.schedule()
        names = list(output.num_scheduled_tokens)
        index = {name: at for at, name in enumerate(names)}
        sampled = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=[[7]] * len(names))
        engine.update_from_output(output, sampled)
        if step >= STEPS // 10:
            spent.append((time.thread_time_ns() - began) / 1e3)
    engine.shutdown()
    return spent


def timed(total):
    """Make the plugin's own part of each step count its CPU time."""

    def of(method, is_static):
        def call(self, *values):
            began = time.thread_time_ns()
            result = method(*values) if is_static else method(self, *values)
            total.append((method.__name__, (time.thread_time_ns() - began) / 1e3))
            return result

        return call

    for name in PARTS:
        is_static = isinstance(vars(scheduler.Tracing)[name], staticmethod)
        setattr(scheduler.Tracing, name, of(getattr(scheduler.Tracing, name), is_static))


def main():
    os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
    recorder.MOST_WEIGHT = 10**9  # nothing is dropped: that would be cheaper
    kinds = {"without": AsyncScheduler, "with": Scheduler}  # as the flag has it
    inside: list[tuple[str, float]] = []
    timed(inside)
    rows, number = [], 0
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder))
        for batch in BATCHES:
            spent, own = {name: [] for name in kinds}, []
            for _ in range(ROUNDS):
                for name, kind in kinds.items():
                    number += 1
                    inside.clear()
                    spent[name] += run(kind, config, batch, number)
                    if name == "with":
                        each = [[us for part, us in inside if part == p] for p in PARTS]
                        own += [sum(parts) for parts in zip(*each, strict=False)]
            medians = {name: statistics.median(values) for name, values in spent.items()}
            rows.append(
                {
                    "requests": batch,
                    "step_us": round(medians["without"], 1),
                    "more_us": round(medians["with"] - medians["without"], 1),
                    "plugin_us": round(statistics.median(own), 1),
                    "plugin_mean_us": round(statistics.mean(own), 1),
                    "allowed_us": 30 + batch,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if any(row["plugin_us"] > row["allowed_us"] for row in rows):
        sys.exit("the plugin costs more than 30 us a step and 1 us a request in it")


if __name__ == "__main__":
    main()
