"""Whether the cheapest of twelve servers by a transfer is the cheapest by traces of each of them.

    python tests/benchmarks/cheapest.py [--loads 10]

Twelve servers of one model are generated: three GPUs and four sizes of tensor parallelism. Three of them are sources;
the other nine are transferred, with `--force`. Each load is planned twice: with these models, and with models that are
fitted to each server's own traces, which say what is true. Prints for each load both cheapest servers with their cost
per hour, and whether the true one is first, or among those that may be within the intervals.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tracefit
from tracefit.errors import TracefitError
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import GPUS, MODELS, RooflineLaw

if TYPE_CHECKING:
    from tracefit.results.plans import RankedServers

MODEL, NAMES, SIZES = "llama-8b", ("A100", "H100", "H200"), (1, 2, 4, 8)
PRICES = {"A100": 1.6, "H100": 2.5, "H200": 3.4}
"""US dollars per GPU and hour: assumed, usual prices of rented machines."""
SOURCES = (("H100", 1), ("H100", 4), ("A100", 2))


class Load(NamedTuple):
    """A load with its objective."""

    rate: float
    prompt: int
    output: int
    itl_p90_ms: float


LOADS = (
    *(Load(5, 500, 200, 30), Load(20, 500, 200, 30), Load(60, 500, 200, 30), Load(200, 200, 100, 20)),
    *(Load(10, 1_500, 300, 15), Load(40, 1_000, 300, 12), Load(30, 300, 500, 8), Load(100, 300, 300, 10)),
    *(Load(15, 3_000, 100, 25), Load(80, 800, 150, 6)),
)


def generated(gpu: str, tp: int, folder: Path) -> Path:
    """Return the folder of a generated run."""
    law = RooflineLaw(MODELS[MODEL], GPUS[gpu], tp=tp)
    name = f"{gpu}-tp{tp}"
    options = SynthOptions(
        name=name, law=law, model=MODEL, gpu=gpu, tp=tp, requests=300, form="fpm", seed=SIZES.index(tp)
    )
    return write_run(synth(options), folder)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=len(LOADS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        fast = tracefit.TrainOptions(fast=True)
        own, computed = {}, {}
        for gpu, tp in product(NAMES, SIZES):
            run = generated(gpu, tp, folder / "runs")
            own[gpu, tp] = folder / "own" / run.name
            tracefit.run(str(run), own[gpu, tp], options=fast)
        sources = [own[key] for key in SOURCES]
        for (gpu, tp), traced in own.items():
            run = folder / "runs" / f"{gpu}-tp{tp}"
            server = tracefit.ServerOptions(model_config=run / "config.json", run_config=run / "exp-config.yaml")
            computed[gpu, tp] = folder / "computed" / run.name
            if (gpu, tp) in SOURCES:
                computed[gpu, tp] = traced
                continue
            tracefit.transfer(sources, computed[gpu, tp], server=server, force=True)
        print("| load | cheapest by transfer | cheapest by own traces | may be the cheapest |\n|" + " --- |" * 4)
        right = 0
        for load in LOADS[: options.loads]:
            right += _compared(load, computed, own)
        print(f"\n{right} of {options.loads} loads: the true cheapest is first, or may be within the intervals")


def _compared(load: Load, computed: dict[tuple[str, int], Path], own: dict[tuple[str, int], Path]) -> bool:
    """Print a load, and return whether the true cheapest is first or may be."""
    by_transfer, by_own = (_ranked(load, models) for models in (computed, own))
    if not by_own or not by_transfer:
        print(f"| {load} | {len(by_transfer)} carry it | {len(by_own)} carry it | - |")
        return not by_own and not by_transfer
    first, truth = by_transfer[0], by_own[0]
    # Several may cost the same.
    cheapest = {Path(one.name).name for one in by_own if one.cost_per_hour == truth.cost_per_hour}
    names = [Path(one.name).name for one in by_transfer if one.ties]
    print(
        f"| {load.rate:g}/s, {load.prompt} and {load.output} tokens, ITL P90 {load.itl_p90_ms:g} ms | "
        f"{Path(first.name).name}, {first.cost_per_hour:.1f} | {', '.join(sorted(cheapest))}, "
        f"{truth.cost_per_hour:.1f} | {len(names)} of {len(by_transfer)} |"
    )
    return Path(first.name).name in cheapest or not cheapest.isdisjoint(names)


def _ranked(load: Load, models: dict[tuple[str, int], Path]) -> tuple[RankedServers, ...]:
    requests = tracefit.LoadOptions(prompt=load.prompt, output=load.output)
    try:
        return tracefit.plan(
            list(models.values()),
            rate=load.rate,
            slo_ms={"itl_p90": load.itl_p90_ms},
            requests=requests,
            price=PRICES,
        ).ranked
    except TracefitError:
        return ()


if __name__ == "__main__":
    main()
