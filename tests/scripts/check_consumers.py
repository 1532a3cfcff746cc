"""Replay runs in BLIS with the exported coefficients and with its defaults, and hold both against the trace.

`python tests/scripts/check_consumers.py BUILD [--picture FILE] [--also]`, BLIS=folder with `blis`, `defaults.yaml`
(../shared/tools)

Runs: those in fixtures/generated/ and three draws each of three other models; `--also` adds other loads and models. A
run may be known not to meet what is asked: the reason is printed with it. Coefficients come from the first 70 % of the
steps; errors are those of requests that arrived in the last 30 % of the run (after the last training step where at
least 30 did). BLIS replays the whole run, by the command the export prints. Without BLIS everything is skipped, and
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from tracefit import TrainOptions
from tracefit import run as run_all
from tracefit.commands.export import ExportResult, export
from tracefit.consumers.blis_fit import BAR_PCT
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import GPUS, MODELS, RooflineLaw, ServedModel
from tracefit.synth.options import LoadPhase

ROOT = Path(__file__).parents[2]
PERCENTILES = (50, 90, 99)
MIN_STRICT = 30

LLAMA_2_7B = msgspec.structs.replace(
    MODELS["llama-8b"],
    served_name="meta-llama/Llama-2-7b-hf",
    ffn_size=11_008,
    num_kv_heads=32,
    vocab_size=32_000,
    max_position_embeddings=4_096,
)
MISTRAL_7B = msgspec.structs.replace(
    MODELS["llama-8b"],
    served_name="mistralai/Mistral-7B-v0.1",
    architecture="MistralForCausalLM",
    model_type="mistral",
    vocab_size=32_000,
    max_position_embeddings=32_768,
)
CODELLAMA_34B = msgspec.structs.replace(
    MODELS["llama-70b"],
    served_name="codellama/CodeLlama-34b-Instruct-hf",
    num_layers=48,
    ffn_size=22_016,
    max_position_embeddings=16_384,
)
QWEN3_14B = msgspec.structs.replace(
    MODELS["llama-8b"],
    served_name="Qwen/Qwen3-14B",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    num_layers=40,
    hidden_size=5_120,
    ffn_size=17_408,
    num_heads=40,
    vocab_size=151_936,
    max_position_embeddings=40_960,
)
WAVES = tuple(LoadPhase(f"wave {i}", 1.0, rate) for i, rate in enumerate((0.6, 1.4, 0.6, 1.4, 0.6, 1.4)))


@dataclass(frozen=True, slots=True)
class Generated:
    """A run to generate; the law is a roofline of `model`, which the generator need not know by name."""

    options: SynthOptions
    model: ServedModel
    reason: str | None = None
    """Why it is not expected to meet what is asked."""


ADDED = (
    "its steps are the larger of compute and memory time plus an overhead: BLIS has the larger of the two, or "
    "the overhead"
)
SEEDS = (1, 2, 3)
"""Draws of each generated run, fixed before any was replayed: one draw alone may be kind."""

GENERATED = tuple(
    replace(one, options=replace(one.options, name=f"{one.options.name}-{seed}", seed=seed))
    for one in (
        Generated(SynthOptions(name="llama-2-7b", requests=600), LLAMA_2_7B, ADDED),
        Generated(SynthOptions(name="qwen3-14b", requests=600, rate_per_s=9.0), QWEN3_14B, ADDED),
        Generated(SynthOptions(name="tiny-a100", requests=600, gpu="A100", rate_per_s=40.0), MODELS["tiny"]),
    )
    for seed in SEEDS
)
ALSO = (
    Generated(SynthOptions(name="mistral-7b-waves", seed=33, requests=600, phases=WAVES), MISTRAL_7B, ADDED),
    Generated(
        SynthOptions(name="codellama-34b", seed=22, requests=600, tp=2, rate_per_s=8.0),
        CODELLAMA_34B,
        ADDED,
    ),
    Generated(
        SynthOptions(name="qwen-moe-waves", seed=36, requests=600, rate_per_s=10.0, phases=WAVES),
        MODELS["qwen-moe-30b"],
        "experts that a step touches saturate with its batch, by routing that is not uniform",
    ),
    Generated(
        SynthOptions(name="qwen-moe-to-heavy", seed=23, requests=600),
        MODELS["qwen-moe-30b"],
        "trained on up to 18 requests at once, held out at 64: a small error of its step grows in the queue",
    ),
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One run in BLIS against its trace: (latency, percentile) to milliseconds."""

    run: str
    requests: int
    strict: bool
    trace: dict[tuple[str, int], float]
    fitted: dict[tuple[str, int], float]
    defaults: dict[tuple[str, int], float]
    reason: str | None

    def off(self, simulated: dict[tuple[str, int], float], what: tuple[str, int]) -> float:
        """Return an error in percent."""
        return 100 * (simulated[what] / self.trace[what] - 1)

    def misses(self) -> list[str]:
        """Say what is asked and not met."""
        found = [
            f"{name} P{p} {self.off(self.fitted, (name, p)):+.1f} % (bar {most:g} %)"
            for (name, p), most in BAR_PCT.items()
            if abs(self.off(self.fitted, (name, p))) > most
        ]
        fitted, defaults = (
            max(abs(self.off(simulated, what)) / most for what, most in BAR_PCT.items())
            for simulated in (self.fitted, self.defaults)
        )
        return [*found, *(["BLIS's defaults are closer"] if fitted >= defaults else [])]


def generate(one: Generated, folder: Path) -> Path:
    """Write a generated run, its config.json and its name those of the model of its law."""
    gpu = GPUS[one.options.gpu or "H100"]
    law = RooflineLaw(one.model, gpu, tp=one.options.tp)
    written = write_run(synth(replace(one.options, law=law)), folder, formats=("json",), compress="zst")
    (written / "config.json").write_text(json.dumps(one.model.config(), indent=2))
    config = written / "exp-config.yaml"
    named = MODELS[one.options.model].served_name
    config.write_text(config.read_text().replace(named, one.model.served_name))
    return written


def replay(command: str, results: Path, blis: Path, defaults: Path | None = None) -> dict[int, dict[str, float]]:
    """Run a printed replay command; with its own coefficients if `defaults` is given."""
    words = [*shlex.split(command), "--results-path", str(results), "--horizon", "100000000000"]
    words[0] = str(blis)
    if defaults is not None:
        words[words.index("--defaults-filepath") + 1] = str(defaults)
        # Its own GPU figures and backend, where the export has others.
        words[words.index("--hardware-config") + 1] = str(defaults.parent / "hardware_config.json")
        backend = "--decode-latency-model"
        if backend in words:
            words[words.index(backend) + 1] = "trained-physics"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    found = json.loads(results.read_text())
    rows = found if isinstance(found, list) else found["requests"]
    return {int(str(row["request_id"]).split("_")[-1]): row for row in rows}


def replay_command(made: ExportResult) -> str:
    """Return the replay command among an export's notes."""
    return next(n.split(": ", 1)[1] for n in made.notes if n.startswith("replay of the traced requests: "))


def percentiles(rows: pl.DataFrame, columns: dict[str, str]) -> dict[tuple[str, int], float]:
    """Return the percentiles of latencies in ms."""
    return {
        (name, p): float(np.percentile(rows[column].to_numpy().astype(float), p)) / 1e3
        for name, column in columns.items()
        for p in PERCENTILES
    }


def compare(run: str, made: Path, blis: Path, reason: str | None) -> Replayed:
    """Export the deployment of a run from this run's models and tables, and replay it."""
    folder = made / "blis"
    exported = export(made / "models", "blis", folder, tables=made / "tables")
    fitted = replay(replay_command(exported), made / "fitted.json", blis / "blis")
    own = replay(replay_command(exported), made / "defaults.json", blis / "blis", blis / "defaults.yaml")
    requests = pl.concat(
        [pl.read_parquet(p) for p in (made / "tables/requests").rglob("*.parquet")], how="diagonal_relaxed"
    )
    rows = requests.drop_nulls(["arrival_ns", "first_token_ns", "prompt_tokens"]).sort("arrival_ns")
    rows = rows.with_row_index("i")
    steps = pl.concat(
        [pl.read_parquet(p) for p in (made / "tables/beta_training").rglob("*.parquet")],
        how="diagonal_relaxed",
    )
    begin, end = rows["arrival_ns"].min(), rows["arrival_ns"].max()
    from_ns = begin + 0.7 * (end - begin)
    counted = rows.filter(
        pl.col("finish_status").ne_missing("aborted"),
        pl.col("output_tokens") > 1,
        pl.col("departed_ns").is_not_null(),
        pl.col("arrival_ns") >= from_ns,
    )
    trained = steps.filter(pl.col("split") == "holdout")["ts_ns"].min()
    strict = counted.filter(pl.col("arrival_ns") >= trained)
    counted = strict if strict.height >= MIN_STRICT else counted
    for prefix, replayed in (("fitted", fitted), ("own", own)):
        counted = counted.with_columns(
            pl.Series(f"{prefix}_{key}", [float(replayed[i][key]) for i in counted["i"]])
            for key in ("ttft_us", "itl_mean_us", "e2e_us")
        )

    def keys(prefix: str) -> dict[str, str]:
        return {"TTFT": f"{prefix}ttft_us", "ITL": f"{prefix}itl_mean_us", "E2E": f"{prefix}e2e_us"}

    measured = {"TTFT": "ttft_us", "ITL": "itl_us", "E2E": "client_us"}
    return Replayed(
        run,
        counted.height,
        strict.height >= MIN_STRICT,
        percentiles(counted, measured),
        percentiles(counted, keys("fitted_")),
        percentiles(counted, keys("own_")),
        reason,
    )


def table(found: list[Replayed]) -> str:
    """Lay the replays out: errors in percent of the exported coefficients, and of BLIS's defaults in brackets."""
    head = f"{'run':20s} {'requests':>8s}" + "".join(
        f"  {name + ' P' + '/P'.join(map(str, PERCENTILES)) + ' %':^44s}" for name in ("TTFT", "ITL", "E2E")
    )
    lines = [head]
    for one in found:
        cells = []
        for name in ("TTFT", "ITL", "E2E"):
            pairs = [
                f"{one.off(one.fitted, (name, p)):+.1f} ({one.off(one.defaults, (name, p)):+.0f})" for p in PERCENTILES
            ]
            cells.append(f"  {'  '.join(pairs):^44s}")
        lines.append(f"{one.run:20s} {one.requests:8d}{'' if one.strict else '*'}{''.join(cells)}")
        lines += [f"{'':20s}   not met: {miss}" for miss in one.misses()]
        if one.reason and one.misses():
            lines.append(f"{'':20s}   expected: {one.reason}")
    return "\n".join(lines)


def worst(found: list[Replayed]) -> str:
    """Say how far the exported coefficients and the defaults are off at most, over all runs."""
    said = []
    for name, at in (("E2E", (50, 90)), ("ITL", (50, 90)), ("TTFT", (50,))):
        fitted, defaults = (
            max(abs(one.off(simulated(one), (name, p))) for one in found for p in at)
            for simulated in (lambda one: one.fitted, lambda one: one.defaults)
        )
        where = " and ".join(f"P{p}" for p in at)
        said.append(f"{name} at {where} {fitted:.1f} % (defaults {defaults:.0f} %)")
    return f"at most: {', '.join(said)}"


def say(text: str) -> None:
    """Print a line at once: a check takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Check and print; 1 where something asked is not met that was expected to be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--also", action="store_true")
    options = parser.parse_args()
    blis = Path(os.environ.get("BLIS", ROOT / "../shared/tools")).resolve()
    fixtures = sorted((ROOT / "fixtures/generated").iterdir())
    generated = (*GENERATED, *(ALSO if options.also else ()))
    if not (blis / "blis").is_file():
        say(f"skipped: {len(fixtures) + len(generated)} replays, no blis in {blis} (BLIS=folder)")
        return 0
    reason = {one.options.name: one.reason for one in generated}
    runs = [*fixtures, *(generate(one, options.build / "runs") for one in generated)]
    found = []
    for path in runs:
        made = options.build / path.name
        run_all([path], made, options=TrainOptions(fast=True))
        found.append(compare(path.name, made, blis, reason.get(path.name)))
    say(table(found))
    if any(not one.strict for one in found):
        say("* the backlog of training lasts into them: too few arrived after the last training step")
    if options.picture:
        from make_replay_picture import picture  # noqa: PLC0415 - nothing is drawn without it

        also = {one.options.name for one in ALSO}
        options.picture.write_text(picture([o for o in found if o.run not in also]), encoding="utf-8")
    missed = [one.run for one in found if one.misses() and not one.reason]
    say(worst(found))
    say(f"{len(found)} replays, {len(found) - sum(bool(o.misses()) for o in found)} meet all that is asked")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
