"""Fit the law that the package carries to public points, and print its errors: `make law SAMPLE=file`.

    python tests/scripts/make_law.py SAMPLE [OUT]

SAMPLE is the wheel `aiconfigurator-core` 0.12.0 (Apache-2.0; `pip download --no-deps aiconfigurator-core==0.12.0`),
which has measured points of servers (`silicon_sample.csv`) and the configurations of their models. Only points of vLLM
that serves all of a request itself are used, with one rank of data parallelism, no pipeline, and up to eight GPUs. The
decode steps of two servers in `fixtures/runs` are beside them. The points are not copied: what is written are the law
and its errors.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl

import tracefit
from tracefit.coefficients.boxed import box
from tracefit.commands.deployments import deployments_of, load_deployment, sample_runs, write_timelines
from tracefit.commands.transfer import with_blocks
from tracefit.errors import TracefitError
from tracefit.fit.points import PointServer
from tracefit.fit.transfer import law_rows
from tracefit.server.context import RunContext, deployment_of
from tracefit.server.hardware import find_gpu
from tracefit.server.model_config import parse_architecture
from tracefit.server.settings import settings_from
from tracefit.tables.store import TableStore

FIXTURES = Path(__file__).parents[2] / "fixtures" / "runs"
_STEPS = ("h100-codellama-34b-tp2-general", "qwen3.6-35b-a3b-tp2")
"""Runs on GPUs; the third, Qwen3-32B on B300, stays out, so that the decode steps of this model are a test of the
law."""
_MOST_ROWS = 100_000
OUT = Path(__file__).parents[2] / "pipeline" / "tracefit" / "coefficients" / "law_vllm.json"
_SAMPLE = "aiconfigurator_core/systems/silicon_sample.csv"
_CONFIGS = "aiconfigurator_core/model_configs"
_CONFIG_OF = {
    ("MiniMaxAI/MiniMax-M2.5", "fp8"): "MiniMaxAI--MiniMax-M2.5",
    ("MiniMaxAI/MiniMax-M2.5", "nvfp4"): "nvidia--MiniMax-M2.5-NVFP4",
    ("Qwen/Qwen3-235B-A22B-FP8", "fp8"): "Qwen--Qwen3-235B-A22B-FP8",
    ("Qwen/Qwen3-32B", None): "Qwen--Qwen3-32B",
    ("Qwen/Qwen3-32B", "fp8"): "Qwen--Qwen3-32B-FP8",
    ("moonshotai/Kimi-K2.5", "nvfp4"): "nvidia--Kimi-K2.5-NVFP4",
    ("moonshotai/Kimi-K2.5", "int4_wo"): "moonshotai--Kimi-K2.5",
    # Its own experts have four bits, which the sample calls nvfp4.
    ("openai/gpt-oss-120b", "nvfp4"): "openai--gpt-oss-120b",
    ("meta-llama/Llama-3.1-70B", "fp8"): "meta-llama--Meta-Llama-3.1-70B",
    ("meta-llama/Llama-3.1-70B", "nvfp4"): "meta-llama--Meta-Llama-3.1-70B",
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): "meta-llama--Meta-Llama-3.1-8B",
}
_METHODS = {
    "fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "nvfp4": {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
}
"""Quantization of Llama's checkpoints by NVIDIA, whose configurations in the wheel are of the model before it."""
_MOST_GPUS = 8
_SAME = (
    *("model_path", "system", "isl", "osl", "batch_size", "tp_size", "moe_tp_size", "moe_ep_size"),
    *("gemm_quant_mode", "moe_quant_mode", "silicon_tpot_ms"),
)
_SERVER = ("model_path", "gemm_quant_mode", "system", "tp_size", "is_expert_parallel")


def servers_of(sample: zipfile.ZipFile) -> tuple[list[PointServer], dict[str, int]]:
    """Return the servers of the sample with their points, and how many rows are left out, by reason."""
    rows = pl.read_csv(io.BytesIO(sample.read(_SAMPLE)), infer_schema_length=None)
    counts: Counter[str] = Counter()

    def kept(frame: pl.DataFrame, condition: pl.Expr, reason: str) -> pl.DataFrame:
        found = frame.filter(condition)
        counts[reason] += frame.height - found.height
        return found

    shards = pl.col("moe_tp_size").clip(1) * pl.col("moe_ep_size").clip(1)
    has_experts = pl.col("model_path").str.contains("MiniMax|A22B|Kimi|gpt-oss")
    of_vllm = kept(rows, pl.col("backend") == "vllm", "another engine")
    of_vllm = kept(of_vllm, pl.col("mode") == "agg", "prompts on other servers")
    of_vllm = kept(of_vllm, pl.col("pp_size") == 1, "a pipeline")
    of_vllm = kept(of_vllm, pl.col("attention_dp_size").fill_null(1) <= 1, "data-parallel ranks")
    of_vllm = kept(of_vllm, pl.col("tp_size") <= _MOST_GPUS, "more than eight GPUs")
    unlike = has_experts & (shards != pl.col("tp_size"))
    of_vllm = kept(of_vllm, ~unlike, "experts on other GPUs than the rest")
    unique = of_vllm.unique(_SAME, maintain_order=True)
    counts["the same row again"] += of_vllm.height - unique.height
    unique = unique.with_columns(is_expert_parallel=pl.col("moe_ep_size") > 1)
    servers = []
    for (model, method, system, tp, is_expert_parallel), points in unique.group_by(_SERVER, maintain_order=True):
        context = _context(sample, str(model), method and str(method), str(system))
        stated: dict[str, Any] = {"tensor_parallel": tp, "enable_expert_parallel": is_expert_parallel}
        settings = settings_from({"model": model, "max_num_seqs": 1024, **stated}, where=_SAMPLE)
        try:
            context = with_blocks(RunContext(settings, context.architecture, context.gpu))
        except TracefitError:
            counts["no room for the weights"] += points.height
            continue
        one = PointServer.of(deployment_of(context), _columns(points))
        counts.update(one.rows.left_out)
        if one.points.height:
            servers.append(one)
    counts["used"] = sum(one.points.height for one in servers)
    return servers, dict(sorted((reason, n) for reason, n in counts.items() if n))


def _context(sample: zipfile.ZipFile, model: str, method: str | None, system: str) -> RunContext:
    """Return the model and GPU of a row."""
    name = _CONFIG_OF[model, method]
    config = json.loads(sample.read(f"{_CONFIGS}/{name}_config.json"))
    if "Llama" in name and method is not None:
        config["quantization_config"] = _METHODS[method]
    config["_name_or_path"] = model
    architecture = parse_architecture(json.dumps(config), where=name)
    return RunContext(settings_from({}, where=name), architecture, find_gpu(system.split("_", maxsplit=1)[0]))


def steps_of(folder: Path) -> list[PointServer]:
    """Return the servers in `fixtures/runs` whose decode steps are used; `folder` is for their tables."""
    found = []
    for name in _STEPS:
        tracefit.ingest([FIXTURES / name], folder / name)
        store = TableStore(folder / name).require()
        runs = store.read("runs", None)
        ((deployment, members),) = deployments_of(runs, name)
        write_timelines(store, kept := sample_runs(runs, members, most_rows=_MOST_ROWS, most_runs=1))
        found.append(PointServer.of_steps(law_rows(deployment, load_deployment(store, kept))))
    return found


def _columns(points: pl.DataFrame) -> pl.DataFrame:
    return points.select(
        concurrency=pl.col("batch_size").cast(pl.Float64),
        prompt_tokens=pl.col("isl").cast(pl.Float64),
        output_tokens=pl.col("osl").cast(pl.Float64),
        ttft_us=1e3 * pl.col("silicon_ttft_ms"),
        tpot_us=1e3 * pl.col("silicon_tpot_ms"),
    )


def main() -> None:
    """Write the law, and print its errors."""
    path = Path(sys.argv[1])
    with zipfile.ZipFile(path) as sample:
        servers, rows = servers_of(sample)
    with tempfile.TemporaryDirectory() as folder:
        servers += steps_of(Path(folder))
    law = box(
        servers,
        engine="vllm",
        source=(
            "silicon_sample.csv of aiconfigurator-core 0.12.0 (ai-dynamo/aiconfigurator, Apache-2.0), and decode "
            "steps of two runs in fixtures/runs"
        ),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        command="make law SAMPLE=aiconfigurator_core-0.12.0-*.whl",
        rows=rows,
    )
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else OUT
    out.write_text(law.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{reason} {count:,}" for reason, count in rows.items()))
    print(", ".join(f"{c.feature} {c.value:.3g}" for c in law.law))
    head = (
        "| left out | groups | points | median % | P90 % | nearest % | roofline % | 80 % interval holds % | "
        "after ten points % | before % |"
    )
    print(f"{head}\n|{' --- |' * 10}")
    for kind, e in law.errors.items():
        cells = [e.mdape_pct, e.p90_ape_pct, e.nearest_mdape_pct, e.roofline_mdape_pct, e.covered_pct]
        cells += [e.calibrated_mdape_pct, e.uncalibrated_mdape_pct]
        text = " | ".join("-" if value is None else f"{value:.1f}" for value in cells)
        print(f"| {kind} | {e.groups} | {e.points} | {text} |")


if __name__ == "__main__":
    main()
