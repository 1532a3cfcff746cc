"""Check what tracefit-vllm uses of vLLM against a wheel, or a folder of one, without installing it: `check_wheel.py WHEEL...`."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

from tracefit_vllm.scheduler import OVERRIDDEN

FIELDS = {
    "vllm/v1/core/sched/output.py": {
        "SchedulerOutput": {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"},
        "CachedRequestData": {"req_ids", "num_computed_tokens", "new_block_ids"},
        "NewRequestData": {"req_id", "num_computed_tokens", "block_ids"},
    },
    "vllm/v1/engine/__init__.py": {
        "EngineCoreOutput": {"request_id", "new_token_ids", "finish_reason"},
        "EngineCoreOutputs": {"outputs"},
    },
}
"""Classes to their fields that are read."""


def classes(wheel: Path, file: str) -> dict[str, ast.ClassDef]:
    if wheel.is_dir():
        source = (wheel / file).read_text()
    else:
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(file).decode()
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


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
    for file, fields_of in FIELDS.items():
        of_file = classes(wheel, file)
        for name, wanted in fields_of.items():
            has = {node.target.id for node in of_file[name].body if isinstance(node, ast.AnnAssign)}
            found += [f"{name}.{field} is not there" for field in sorted(wanted - has)]
    return found


if __name__ == "__main__":
    bad = [f"{wheel}: {text}" for wheel in sys.argv[1:] for text in problems(Path(wheel))]
    print("\n".join(bad) or "all that is used is there")  # noqa: T201 - a command
    sys.exit(bool(bad))
