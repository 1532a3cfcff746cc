"""How well the law predicts servers that it was not fitted on, beside simpler answers.

    python tests/benchmarks/transfer.py DATA [--more FOLDER]
    python tests/benchmarks/transfer.py --generated

DATA is a folder with `fpm-b300/`, runs recorded as ForwardPassMetrics, and a step-traced run of an H100 (see `gpu.py`);
FOLDER has further runs of the same kind, one folder each, which are only predicted. Prints mean absolute errors of step
times in percent: of each kind of transfer without any step of the server, and after 20 and 100 well-spread ones;
"equal" is the error of a guess that knows the best time of each batch of these steps, the least that one of batches
can have; and median errors of the law in the package on the steps without prompts, some of them used for it
(`make law`).
`--generated` does so on servers of the generator: four laws, three models, three GPUs and three sizes of tensor
parallelism.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec.structs import replace

import tracefit
from tracefit.coefficients.boxed import boxed_law
from tracefit.commands.deployments import deployments_of, load_deployment, write_timelines
from tracefit.fit.deployments import with_seen_limits
from tracefit.fit.fitted import target_of
from tracefit.fit.transfer import (
    DECODES,
    PROMPTS,
    LawRows,
    calibrate,
    choose_sources,
    errors_of,
    fit_law,
    law_rows,
    leave_out,
    nearest,
    prompts_of,
    roofline,
    unchanged,
)
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import GPUS, MODELS, RooflineLaw
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.fit.transfer import Kind
    from tracefit.statistics import Vector

CALIBRATED = (20, 100)
_WARM_UP = 0.02
H100 = "h100-codellama-34b-tp2-general"
LAWS = (
    {},
    {"compute_efficiency": 0.7, "memory_efficiency": 0.6, "base_us": 600.0},
    {"compute_efficiency": 0.4, "memory_efficiency": 0.85, "base_us": 2_000.0, "per_req_us": 15.0},
    {"memory_efficiency": 0.8, "base_us": 900.0, "per_req_us": 3.0, "allreduce_latency_us": 4.0},
)
"""Efficiencies and overheads of the generator's roofline."""


def rows_of(paths: Sequence[Path], folder: Path) -> dict[str, LawRows]:
    """Return the steps of every run with a known model and GPU, by the name of its folder."""
    tracefit.ingest([str(path) for path in paths], folder)
    store = TableStore(folder)
    runs = store.read("runs", None)
    write_timelines(store, runs["run_id"].unique())
    found = {}
    for deployment, members in deployments_of(runs, str(folder)):
        if deployment.context.architecture is None or deployment.context.gpu is None:
            print(f"left out: {', '.join(members)}: {'; '.join(deployment.context.left_out)}")
            continue
        tables = load_deployment(store, members)
        seen, _ = with_seen_limits(deployment, tables.timeline)
        found[members[0]] = law_rows(seen, tables)
    return found


def _pct(actual: Vector, predicted: Vector) -> float:
    return float(100 * np.mean(np.abs(predicted - actual) / actual)) if len(actual) else float("nan")


@dataclass(frozen=True, slots=True)
class Case:
    """Transfers of one kind to several servers from the same sources, or from all others."""

    name: str
    targets: dict[str, LawRows]
    sources: Callable[[LawRows], list[LawRows]]

    def print(self) -> None:
        """Print a row per server, and the means."""
        means: list[list[float]] = []
        for name, target in self.targets.items():
            began = time.process_time()
            if not (sources := self.sources(target)):
                continue  # DATA has the only server of a model
            kind, chosen, wider = choose_sources(target.context, sources)
            law = fit_law(chosen, kind, wider)
            folds = leave_out(chosen, kind, wider)
            expected = errors_of(folds)
            seconds = time.process_time() - began
            actual, predicted, prompts = (
                target_of(target.rows),
                law.predict(target.rows),
                prompts_of(target.rows),
            )
            limits = np.where(prompts, expected.of(PROMPTS), expected.of(DECODES))
            covered = float(100 * (100 * np.abs(predicted - actual) / actual <= limits).mean())
            values = [
                _pct(actual, predicted),
                _pct(actual[prompts], predicted[prompts]),
                _pct(actual, unchanged(target, nearest(target.context, chosen))),
                _pct(actual, roofline(target.rows)),
                *(_calibrated(law, target, n) for n in CALIBRATED),
                _equal_batches_pct(target.rows),
                covered,
            ]
            means.append(values)
            cells = " | ".join(f"{value:.1f}" for value in values)
            print(f"| {self.name} | {name} | {kind} | {len(chosen)} | {cells} | {seconds:.1f} |")
        if not means:
            return
        cells = " | ".join(f"{value:.1f}" for value in np.nanmean(np.array(means), axis=0))
        print(f"| **{self.name}** | **mean of {len(means)}** | | | {cells} | |")


_EQUAL = 0.05
"""Amounts of tokens within this share are equal."""


def _equal_batches_pct(rows: pl.DataFrame) -> float:
    """Return the least mean absolute percentage error of a time per batch, on steps whose batch occurs twice."""
    batch = [pl.col(name) for name in rows.columns if name.startswith("of_")]
    classes = [(column.clip(1).log() / np.log1p(_EQUAL)).floor() for column in batch]
    errors = []
    for _, equal in rows.with_columns(classes).group_by([name.meta.output_name() for name in batch]):
        times = np.sort(target_of(equal))
        # The median with weights 1 / time has the smallest sum of relative errors.
        weights = np.cumsum(1 / times)
        best = times[np.searchsorted(weights, weights[-1] / 2)]
        errors += [*(np.abs(times - best) / times)] if len(times) > 1 else []
    return float(100 * np.mean(errors))


def _calibrated(law: object, target: LawRows, steps: int) -> float:
    """Return the error on the other steps after a calibration with some, spread over all but the first."""
    rows = target.rows[int(_WARM_UP * target.rows.height) :]
    chosen = np.unique(np.linspace(0, rows.height - 1, steps).astype(int))
    found = calibrate(law, replace(target, rows=rows[chosen]), errors_of(()))  # type: ignore[arg-type]
    rest = rows[np.setdiff1d(np.arange(rows.height), chosen)]
    return float("nan") if found is None else _pct(target_of(rest), found.law.predict(rest))


def recorded(data: Path, more: Path | None, folder: Path) -> Iterator[Case]:
    """Yield the cases on recorded servers."""
    paths = sorted(path for path in (data / "fpm-b300").iterdir() if "dp2" not in path.name)
    traced = rows_of([*paths, data / H100], folder / "traced")
    others = rows_of(sorted(more.iterdir()), folder / "more") if more is not None else {}
    # A run that is in both is predicted only where it is not a source.
    known = {one.deployment_id for one in traced.values()}
    every = {**traced, **{n: one for n, one in others.items() if one.deployment_id not in known}}

    def of(text: str, rows: dict[str, LawRows]) -> dict[str, LawRows]:
        return {name: one for name, one in rows.items() if text in one.deployment_id}

    h100, sources = ([*of(gpu, traced).values()] for gpu in ("h100", "b300"))
    for model in ("qwen3-32b", "qwen3.6", "deepseek"):
        unseen = {n: one for n, one in of(model, every).items() if one.deployment_id not in known} or of(model, traced)
        yield Case(
            f"unseen TP, {model}",
            unseen,
            lambda target: [one for one in sources if one.deployment_id != target.deployment_id],
        )
    yield Case("unseen GPU, H100 to Qwen3-32B", of("qwen3-32b", every), lambda _: h100)
    yield Case("unseen GPU, B300 to H100", of("h100", traced), lambda _: sources)
    for model in ("qwen3.6", "qwen3-32b"):
        rest = [one for one in sources if model not in one.deployment_id]
        yield Case(f"unseen model, {model} from the others", of(model, every), lambda _, rest=rest: rest)
    law = boxed_law("vllm").fitted()
    for name, one in every.items():
        actual, predicted = target_of(one.rows), law.predict(one.rows)
        off = (predicted / actual - 1)[~prompts_of(one.rows)]
        print(
            f"| law in the package, decode steps | {name} | {100 * np.median(np.abs(off)):.1f} | "
            f"{100 * np.median(off):+.1f} |"
        )


def generated(folder: Path) -> Iterator[Case]:
    """Yield the cases on generated servers."""
    models, gpus, sizes = ("llama-8b", "llama-70b", "qwen-moe-30b"), ("A100", "H100", "H200"), (1, 2, 4)
    for number, law in enumerate(LAWS):
        paths = []
        for model, gpu, tp in product(models, gpus, sizes):
            step_law = RooflineLaw(MODELS[model], GPUS[gpu], tp=tp, **law)
            options = SynthOptions(
                name=f"{model}-{gpu}-tp{tp}",
                law=step_law,
                model=model,
                gpu=gpu,
                tp=tp,
                requests=120,
                form="fpm",
                seed=number,
            )
            paths.append(write_run(synth(options), folder / f"law{number}"))
        rows = rows_of(paths, folder / f"tables{number}")

        def others(kind: Kind, rows: dict[str, LawRows] = rows) -> Callable[[LawRows], list[LawRows]]:
            return lambda target: [one for one in rows.values() if one.group(kind) != target.group(kind)]

        yield Case(f"law {number + 1}, unseen TP", rows, others("tensor_parallel"))
        yield Case(f"law {number + 1}, unseen model", rows, others("model"))
        yield Case(f"law {number + 1}, unseen GPU", rows, others("gpu"))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--more", type=Path)
    parser.add_argument("--generated", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = generated(Path(folder)) if options.generated else recorded(options.data, options.more, Path(folder))
        head = ("case", "server", "kind", "sources", "law %", "prompts %", "nearest %", "roofline %")
        head = (*head, *(f"after {n} steps %" for n in CALIBRATED), "equal %", "covered %", "CPU s")
        print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        for case in cases:
            case.print()


if __name__ == "__main__":
    main()
