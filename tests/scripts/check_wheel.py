"""Check what tracefit-vllm uses of vLLM against a wheel, or a folder of one, without installing it: `check_wheel.py
WHEEL...`."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

from tracefit_vllm.scheduler import OVERRIDDEN

USED = {
    "vllm/v1/core/sched/scheduler.py": {
        "Scheduler": {"vllm_config", "kv_cache_manager", "block_size", "requests"},
    },
    "vllm/v1/core/sched/output.py": {
        "SchedulerOutput": {
            *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
            "scheduled_spec_decode_tokens",
        },
        "CachedRequestData": {"req_ids", "num_computed_tokens", "new_block_ids"},
        "NewRequestData": {"req_id", "num_computed_tokens", "block_ids"},
    },
    "vllm/v1/outputs.py": {"ModelRunnerOutput": {"req_id_to_index", "sampled_token_ids"}},
    "vllm/v1/engine/__init__.py": {
        "EngineCoreOutput": {"request_id", "new_token_ids", "finish_reason"},
        "EngineCoreOutputs": {"outputs"},
    },
    "vllm/v1/request.py": {
        "Request": {
            *("request_id", "trace_headers", "num_prompt_tokens", "max_tokens", "resumable", "is_finished"),
        },
    },
    "vllm/v1/core/kv_cache_manager.py": {"KVCacheManager": {"block_pool"}},
    "vllm/v1/core/block_pool.py": {"BlockPool": {"num_gpu_blocks", "get_num_free_blocks"}},
    "vllm/config/scheduler.py": {"SchedulerConfig": {"async_scheduling", "get_scheduler_cls"}},
    "vllm/config/parallel.py": {"ParallelConfig": {"data_parallel_index", "data_parallel_size"}},
    "vllm/config/observability.py": {"ObservabilityConfig": {"otlp_traces_endpoint"}},
}
"""Classes to what is read of them."""


def classes(wheel: Path, file: str) -> dict[str, ast.ClassDef]:
    if wheel.is_dir():
        source = (wheel / file).read_text()
    else:
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(file).decode()
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def names(of: ast.ClassDef) -> set[str]:
    """Return fields, methods, and what methods assign to `self`."""
    fields = {n.target.id for n in of.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    methods = {node.name for node in of.body if isinstance(node, ast.FunctionDef)}
    stored = (n for n in ast.walk(of) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return fields | methods | {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def problems(wheel: Path) -> list[str]:
    found = []
    (scheduler,) = (classes(wheel, "vllm/v1/core/sched/scheduler.py")[n] for n in ("Scheduler",))
    methods = {node.name: node for node in scheduler.body if isinstance(node, ast.FunctionDef)}
    for name, wanted in OVERRIDDEN.items():
        if name not in methods:
            found.append(f"Scheduler.{name} is not there")
            continue
        has = tuple(argument.arg for argument in methods[name].args.args[1:])
        if has[: len(wanted)] != wanted:
            found.append(f"Scheduler.{name} takes {', '.join(has)}")
    for file, names_of in USED.items():
        of_file = classes(wheel, file)
        for name, wanted in names_of.items():
            found += [f"{name}.{one} is not there" for one in sorted(wanted - names(of_file[name]))]
    return found


if __name__ == "__main__":
    bad = [f"{wheel}: {text}" for wheel in sys.argv[1:] for text in problems(Path(wheel))]
    print("\n".join(bad) or "all that is used is there")
    sys.exit(bool(bad))
