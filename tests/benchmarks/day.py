"""Whether the planned number of servers carries a day, and one fewer does not: three days, each replayed as a whole.

    python tests/benchmarks/day.py [--window 120] [--scale 1] [--slo 400] [--seed 3]

One generated server is recorded for half an hour. Each day has 24 windows: one follows a sine, one has a burst of a minute on top of it, and
in one outputs are twice as long in the evening. The plan reads the arrivals from a CSV file. Then every request of the day goes to one of the
servers at random, with other random numbers than the plan's, and all servers serve all of theirs, once in the replay engine with the models
that the plan had, and once in the generator, with the true law and its noise. A line says for each number of servers whether the objective
holds in the window that the plan names as binding, and in how many windows it is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import tracefit
from tracefit.commands.plan import server_of, store_beside
from tracefit.replay.models import admission_us
from tracefit.replay.run import RequestLoad, replay
from tracefit.synth import LoadPhase, Request, SynthOptions, synth, write_run
from tracefit.synth.simulation import Draws, EngineClock, Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.replay.plan import Fleet

WINDOWS = 24
PEAK_SERVERS = 6
"""Servers of the recorded capacity that the peak fills, about."""
SERVER = SynthOptions(
    seed=5, law="roofline", phases=(LoadPhase("steady", 1.0, 1.0),), abort_fraction=0.0, prefix_fraction=0.0
)
Day = dict[str, np.ndarray]


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def capacity(options: SynthOptions) -> float:
    """Return the requests per second that the server serves when they all come at once."""
    rows = synth(replace(options, form="fpm", requests=1000, rate_per_s=1e4)).truth_requests
    last = np.sort(rows["finished_ns"].to_numpy())
    return 1e9 * 600 / float(last[800] - last[200])


def drawn(kind: str, peak: float, window_s: float, rng: np.random.Generator) -> Day:
    """Draw a day: arrivals by thinning at a rate that changes all the time, and lengths."""
    span = WINDOWS * window_s
    most = 2 * peak
    at_s = np.sort(rng.random(rng.poisson(most * span)) * span)
    hour = at_s / window_s
    rate = peak * (0.55 - 0.45 * np.cos(2 * np.pi * (hour - 2) / 24))
    if kind == "burst":
        # A quarter of a window in the morning, with twice the load.
        rate = np.where((hour >= 9.3) & (hour < 9.55), rate + 0.9 * peak, rate)
    kept = rng.random(len(at_s)) * most < rate
    at_s, hour = at_s[kept], hour[kept]
    prompt = np.clip(np.round(250 * np.exp(0.8 * rng.standard_normal(len(at_s)))), 4, 2000)
    output = np.clip(np.round(80 * np.exp(0.7 * rng.standard_normal(len(at_s)))), 1, 1000)
    if kind == "lengths":
        output = np.where(hour >= 16, np.minimum(2 * output, 1000), output)
    return {"timestamp": at_s, "prompt_tokens": prompt.astype(int), "output_tokens": output.astype(int)}


def by_engine(fleet: Fleet) -> Callable[[Day], np.ndarray]:
    """Return a function from the requests of one server to their TTFT in ms, by the replay engine."""

    def serve(day: Day) -> np.ndarray:
        at_us = 1e6 * day["timestamp"]
        admission = admission_us(fleet.deployment.models.get("alpha.admission"), at_us, day["prompt_tokens"])
        load = RequestLoad(at_us, day["prompt_tokens"], day["output_tokens"])
        return (replay(load, fleet.times, fleet.settings, admission_us=admission).first_us - at_us) / 1e3

    return serve


def by_generator(options: SynthOptions) -> Callable[[Day], np.ndarray]:
    """Return the same by the generator, which shares no code with the plan."""

    def serve(day: Day) -> np.ndarray:
        rng = np.random.default_rng(len(day["timestamp"]))
        jitter = np.exp(rng.normal(0.0, 1.0, len(day["timestamp"])) * options.admission.jitter)
        requests = [
            Request(
                request_id=str(n),
                number=n + 1,
                arrival_ns=int(1e9 * at) + 10**9,
                api_work_us=options.admission.work_us(int(prompt)) * float(late),
                prompt_tokens=int(prompt),
                output_tokens=int(output),
                max_tokens=int(output),
            )
            for n, (at, prompt, output, late) in enumerate(zip(*day.values(), jitter, strict=True))
        ]
        streams = Streams(*map(Draws, rng.spawn(3)))
        EngineClock(options, options.step_law(), streams, requests).run()
        first = [next(p.ts_ns for p in one.points if p.event == "FIRST_TOKEN") for one in requests]
        return (np.array(first) - [one.arrival_ns for one in requests]) / 1e6

    return serve


def missed(
    day: Day, servers: int, limit_ms: float, window_s: float, serve: Callable[[Day], np.ndarray]
) -> dict[int, float]:
    """Return the windows in which TTFT P99 is beyond a limit, with its value."""
    server = np.random.default_rng(99).integers(0, servers, len(day["timestamp"]))
    ttft = np.zeros(len(server))
    for k in range(servers):
        ttft[server == k] = serve({name: column[server == k] for name, column in day.items()})
    numbers = (day["timestamp"] // window_s).astype(int)
    found = {k: float(np.percentile(ttft[numbers == k], 99)) for k in range(WINDOWS)}
    return {k: value for k, value in found.items() if not value <= limit_ms}


def main() -> None:
    """Plan and replay each day."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=float, default=120.0, help="seconds of a window")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the rates")
    parser.add_argument("--slo", type=float, default=400.0, help="TTFT P99 in ms")
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), given)


def measure(folder: Path, given: argparse.Namespace) -> None:
    """Record the server, and plan and replay each day."""
    each = capacity(SERVER)
    phases = tuple(LoadPhase(f"{share:g}", share, share) for share in (0.3, 0.6, 0.9, 0.5, 0.95, 0.2, 0.8))
    recorded = replace(SERVER, name="recorded", requests=int(900 * each), rate_per_s=each, phases=phases)
    tracefit.run(
        [write_run(synth(recorded), folder / "runs")],
        folder / "out",
        options=tracefit.TrainOptions(fast=True),
    )
    models = tracefit.load(folder / "out")
    fleet, _ = server_of(store_beside(folder / "out"), models.deployment(None))
    ways = {"replay engine": by_engine(fleet), "generator": by_generator(SERVER)}
    say(f"a server serves {each:.1f} requests per second of the recording")
    wrong = 0
    for seed, kind in enumerate(("sine", "burst", "lengths"), given.seed):
        day = drawn(kind, given.scale * PEAK_SERVERS * each, given.window, np.random.default_rng(seed))
        pl.DataFrame(day).write_csv(folder / "day.csv")
        began = time.process_time()
        (plan,) = tracefit.plan(
            folder / "out",
            requests=tracefit.LoadOptions(arrivals=str(folder / "day.csv")),
            day=tracefit.DayOptions(window_s=given.window),
            slo_ms={"ttft_p99": given.slo},
        ).plans
        found = plan.day
        if found is None:
            say(f"{kind}: {plan.reason}")
            wrong += 1
            continue
        say(
            f"{kind}: {len(day['timestamp']):,} requests, planned in {time.process_time() - began:.0f} s of CPU: {found.servers} servers, "
            f"{found.servers_likely} likely; window {found.binding} binds; by window {[w.servers for w in found.windows]}"
        )
        scaler = found.scaler
        say(
            f"  scaler: {scaler.spare_pct:g} % spare, at most {scaler.most}, {scaler.server_hours:.1f} server-hours, holds: {scaler.holds}"
        )
        for way, serve in ways.items():
            numbers = sorted({found.servers, found.servers - 1, found.servers_likely - 1} - {0}, reverse=True)
            for servers in numbers:
                began = time.process_time()
                over = missed(day, servers, given.slo, given.window, serve)
                at = over.get(found.binding)
                says = "holds" if at is None else f"fails ({at:.0f} ms)"
                should = (
                    "holds"
                    if servers >= found.servers
                    else "fails"
                    if servers < found.servers_likely
                    else "either"
                )
                is_right = says.startswith(should) or should == "either"
                wrong += not is_right
                say(
                    f"  {way}: {servers} servers: the objective {says} in the binding window, should: {should}; missed in {len(over)} windows "
                    f"{sorted(over)} ({time.process_time() - began:.0f} s)"
                )
    say(f"not as it should be: {wrong}")


if __name__ == "__main__":
    main()
