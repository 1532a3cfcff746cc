"""How well servers are predicted that nobody here has run: public H100 servers with only the load and the clients'
times.

    python tests/benchmarks/unseen.py DATA FOLDER

DATA is a folder with a step-traced run of CodeLlama-34B on two H100 (see `gpu.py`). FOLDER has the files of
`replay_data/` of pull request 1 of inference-sim/training: requests as sent, and TTFT and E2E as clients measured them,
of Llama-2-7B, Llama-2-70B, CodeLlama-34B and Mixtral-8x7B with four workloads each; the traced run is one of these
sixteen. Each server's requests are replayed with the model that `tracefit transfer` writes for it: from the traced run,
and of the law in the package, both without any data of the server and drawn to the requests of its first two minutes
(`--calibrate`). Prints the errors in percent of the means over all later requests, the interval of 90 % that a plan has
from the model, and whether the measured means are in it. The median and the mean of the errors are printed for groups
of servers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

import tracefit
from tracefit.coefficients.files import find_models
from tracefit.coefficients.models import load
from tracefit.replay.engine import EngineSettings, ReplayedRequest, ReplayEngine, StepBatch
from tracefit.replay.models import FittedStepTimes
from tracefit.replay.plan import StepLawUncertainty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.models.deployment import DeploymentModels
    from tracefit.statistics import Flags, Vector

TRACED = "h100-codellama-34b-tp2-general"
TRACED_MODEL, TRACED_NAME = "codellama-34b", "codellama-34b tp2 general"
_MEASURED = "_ground_truth"
FIRST_S = 120.0
"""A calibration sees the requests until then."""
GIVES_UP_S = 300.0
"""When a request fails: the clients' limit."""
ASKED = {"general": 248, "codegen": 247, "roleplay": 251, "reasoning": 1_448}
"""Output tokens that each request of a workload asks for, without an end before (`ignore_eos`), by the profiles beside
the data."""
CONFIGS = {
    "llama-2-7b": (4096, 11008, 32, 32, 32),
    "llama-2-70b": (8192, 28672, 80, 64, 8),
    "codellama-34b": (8192, 22016, 48, 64, 8),
    "mixtral-8x7b": (4096, 14336, 32, 32, 8),
}
"""The models' public config.json: hidden and intermediate size, layers, attention and KV heads."""
LATENCIES = ("itl", "e2e", "ttft")


def config_of(model: str) -> dict[str, Any]:
    """Return what a model's config.json says of its layers."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if model.startswith("mixtral"):
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **experts}
    sizes = dict(zip(names, CONFIGS[model], strict=True))
    return {**config, **sizes, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server with its load and what clients measured; every array of shape (n,), times in us.

    Attributes:
        name: Model, tensor parallelism and workload.
        model: The model.
        engine: Settings, as the data states them.
        sent: The requests as the file has them.
        measured: The latencies as the file has them.
        arrival_us: When each is sent.
        prompt_tokens: Prompt tokens; the median for those that failed, whose length the file does not have.
        output_tokens: Output tokens that each asks for.
        ttft_us: Time to the first token; NaN for those that failed.
        e2e_us: Time to the last token; NaN for those that failed.
    """

    name: str
    model: str
    engine: dict[str, int]
    sent: dict[str, Any]
    measured: list[dict[str, Any]]
    arrival_us: Vector
    prompt_tokens: Vector
    output_tokens: int
    ttft_us: Vector
    e2e_us: Vector

    @classmethod
    def read(cls, path: Path) -> Server:
        """Read the two files of a server."""
        sent = json.loads(path.read_text())
        measured = json.loads(path.with_name(f"{path.stem}{_MEASURED}.json").read_text())
        by_index = {one["index"]: one for one in measured if not one["has_error"]}
        requests = sorted(sent["requests"], key=lambda one: one["arrival_time_us"])
        prompt = np.array([one["input_tokens"] for one in requests], dtype=float)
        found = [by_index.get(one["index"], {}) for one in requests]
        config = sent["config"]
        return cls(
            name=f"{sent['model_short']} tp{config['tensor_parallelism']} {sent['profile']}",
            model=sent["model_short"],
            engine={
                "tensor_parallel_size": config["tensor_parallelism"],
                "max_num_seqs": config["max_num_seqs"],
                "max_num_batched_tokens": config["max_num_batched_tokens"],
                "block_size": config["block_size"],
                "num_gpu_blocks": config["kv_blocks_total_gpu"],
            },
            sent=sent,
            measured=measured,
            arrival_us=np.array([one["arrival_time_us"] for one in requests], dtype=float),
            prompt_tokens=np.where(prompt > 0, prompt, np.median(prompt[prompt > 0])),
            output_tokens=ASKED[sent["profile"]],
            ttft_us=np.array([1e6 * one.get("ttft_s", math.nan) for one in found]),
            e2e_us=np.array([1e6 * one.get("e2e_s", math.nan) for one in found]),
        )

    @property
    def is_overloaded(self) -> bool:
        """Whether requests waited until they failed."""
        return bool(np.isnan(self.e2e_us).any())

    def write_first(self, folder: Path) -> Path:
        """Write the requests of the first two minutes as the data has them, each with the output that it asks for.

        The clients count tokens in the text, where those without text are missing: in Llama-2-7B requests with 11
        tokens took as long as others with 247.
        """
        kept = {one["index"] for one in self.sent["requests"] if one["arrival_time_us"] < 1e6 * FIRST_S}
        folder.mkdir(parents=True, exist_ok=True)
        asked = {"output_tokens": self.output_tokens}
        requests = [one | asked for one in self.sent["requests"] if one["index"] in kept]
        (folder / "requests.json").write_text(json.dumps(self.sent | {"requests": requests}))
        measured = [one for one in self.measured if one["index"] in kept]
        (folder / "measured.json").write_text(json.dumps(measured))
        return folder


class ImpatientEngine(ReplayEngine):
    """An engine whose clients give up."""

    def _admit_arrivals(self) -> None:
        super()._admit_arrivals()
        latest_us = self.now - 1e6 * GIVES_UP_S
        while self.waiting and self.waiting[0].queued_us < latest_us:
            self.waiting.popleft()
        if self.running and min(r.queued_us for r in self.running) < latest_us:
            gone = [r for r in self.running if r.queued_us < latest_us]
            self.running = [r for r in self.running if r.queued_us >= latest_us]
            for request in gone:
                self.cache.release(request)


class RecordedSteps:
    """A model of step times that records the batches and the times of a replay's steps."""

    def __init__(self, times: FittedStepTimes) -> None:
        self._times, self._rows = times, list[tuple[float, ...]]()

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step in us."""
        time_us = self._times.step(batch)
        self._rows.append((*batch, 1.0, time_us))
        return time_us

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps of the same requests in us; shape (steps,)."""
        times_us = self._times.decoding(batch, steps, growth)
        self._rows.append((*batch, float(steps), float(times_us.sum())))
        return times_us

    def batches(self) -> pl.DataFrame:
        """Return a row per group of steps, as `StepLawUncertainty` reads them."""
        names = (*StepBatch._fields, "steps", "time")
        rows = pl.DataFrame(dict(zip(names, np.array(self._rows).T, strict=True)))
        return rows.select(
            "waiting",
            "steps",
            "time",
            prefill_reqs="prefill_reqs",
            prefill="prefill_tokens",
            prefill_done="prefill_context_tokens",
            batch="decode_reqs",
            context=pl.col("context_tokens") / pl.col("decode_reqs").clip(lower_bound=1),
        )


def replayed(server: Server, model: DeploymentModels) -> tuple[dict[str, Vector], tuple[float, float]]:
    """Replay the requests of a server; return their latencies in us, shape (n,), and the interval of the factor on the
    mean step time.

    The prompts of a workload repeat: each is in the prefix cache up to its last full block, except the first time.
    """
    limits = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks")
    times = RecordedSteps(FittedStepTimes(model.step_model, model.server))
    engine = ImpatientEngine(times, EngineSettings(*(server.engine[name] for name in limits)), 0)
    requests = [
        ReplayedRequest(k, float(arrival_us), int(prompt), server.output_tokens, int(prompt))
        for k, (arrival_us, prompt) in enumerate(zip(server.arrival_us, server.prompt_tokens, strict=True))
    ]
    for request in requests:
        engine.send(request)
    engine.run()
    first, last = (np.array([getattr(r, name) for r in requests]) for name in ("first_us", "last_us"))
    law, batches = StepLawUncertainty(model.step_model, model.server), times.batches()
    outside_pct, _ = law.outside(batches)
    # A request that its client gave up has no latency.
    first = np.where(np.isnan(last), math.nan, first)
    found = latencies(server, first - server.arrival_us, last - server.arrival_us)
    return found, law.slowness(batches, outside_pct)


def latencies(server: Server, ttft_us: Vector, e2e_us: Vector) -> dict[str, Vector]:
    """Return the latencies of requests from two of them."""
    return {"ttft": ttft_us, "e2e": e2e_us, "itl": (e2e_us - ttft_us) / (server.output_tokens - 1)}


@dataclass(frozen=True, slots=True)
class Row:
    """Errors of the means of a server in percent, and the interval of the factor on its mean step time."""

    server: Server
    origin: str
    errors: dict[str, float]
    interval: tuple[float, float]

    def covers(self, name: str) -> bool:
        """Return whether the measured mean is in the interval."""
        low, high = self.interval
        return low <= 1 / (1 + self.errors[name] / 100) <= high

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        errors = [f"{self.errors[n]:+.1f}" if not math.isnan(self.errors[n]) else "-" for n in LATENCIES]
        interval = " to ".join(f"{100 * (end - 1):+.0f}" for end in self.interval)
        inside = [name.upper() for name in ("itl", "e2e") if self.covers(name)]
        return [self.server.name, self.origin, *errors, interval, " and ".join(inside) or "neither"]


def compared(server: Server, folder: Path, *, is_calibrated: bool) -> Row:
    """Replay a server with the models of a folder, and compare the means over the requests after the first two
    minutes."""
    models = load(find_models(folder))
    model = models.deployment(*models.deployment_ids)
    found, interval = replayed(server, model)
    truth = latencies(server, server.ttft_us, server.e2e_us)
    later: Flags = server.arrival_us >= 1e6 * FIRST_S
    transfer = model.step_model.transfer
    front_us = 0.0
    if is_calibrated and not server.is_overloaded:
        # As `tracefit replay` does with the requests of a client: the median time around the engine of those before.
        front_us = max(float(np.nanmedian((truth["ttft"] - found["ttft"])[~later])), 0.0)
    found |= {name: found[name] + front_us for name in ("ttft", "e2e")}
    errors = {
        name: float(100 * (np.nanmean(found[name][later]) / np.nanmean(truth[name][later]) - 1)) for name in LATENCIES
    }
    if transfer is not None and not transfer.has_prompts:
        errors["ttft"] = math.nan  # A plan refuses it.
    return Row(server, model.step_model.origin, errors, interval)


def predicted(server: Server, sources: Sequence[Path], out: Path, calibrate: Path | None) -> Path:
    """Write the models of a server as `tracefit transfer` does, and return their folder."""
    out.mkdir(parents=True)
    config = out / "config.json"
    config.write_text(json.dumps(config_of(server.model)))
    new = tracefit.ServerOptions(model_config=config, gpu="H100", settings=dict(server.engine))
    result = tracefit.transfer(list(sources), out / "new", server=new, calibrate=calibrate, force=True)
    for text in result.warnings if calibrate is not None else ():
        print(f"{server.name}: {text}", file=sys.stderr)
    return result.out


def summary(title: str, rows: Sequence[Row]) -> None:
    """Print the median and the mean of the absolute errors of some servers, and how many are in their interval."""
    if not rows:
        return
    cells = [f"{title}: {len(rows)}", "median, mean"]
    for name in LATENCIES:
        errors = np.abs([row.errors[name] for row in rows])
        known = errors[~np.isnan(errors)]
        cells.append(f"{np.median(known):.1f}, {known.mean():.1f}" if len(known) else "-")
    inside = [f"{sum(row.covers(n) for row in rows)} {n.upper()}" for n in ("itl", "e2e")]
    print(f"| **{' | '.join((*cells, '', ', '.join(inside)))}** |", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="servers whose names have this text")
    options = parser.parse_args()
    paths = [path for path in sorted(options.folder.glob("*.json")) if not path.stem.endswith(_MEASURED)]
    servers = [one for one in map(Server.read, paths) if options.only in one.name]
    head = ("server", "origin", *(f"{n.upper()} %" for n in LATENCIES), "interval %", "within")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tracefit.run([options.data / TRACED], folder / "traced")
        for title, sources in (("From step traces", [folder / "traced"]), ("Law in the package", [])):
            for is_calibrated in (False, True):
                print(f"\n{title}{', drawn to the first two minutes' if is_calibrated else ''}\n")
                print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
                rows = []
                for number, server in enumerate(servers):
                    place = folder / f"{len(sources)}{is_calibrated:d}-{number}"
                    first = server.write_first(place / "first") if is_calibrated else None
                    out = predicted(server, sources, place / "out", first)
                    rows.append(compared(server, out, is_calibrated=is_calibrated))
                    print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
                others = [row for row in rows if row.server.name != TRACED_NAME]
                steady = [row for row in others if not row.server.is_overloaded]
                summary("servers but the traced one", others)
                summary("of these, all requests served", steady)
                summary(
                    "of these, another model than the traced",
                    [r for r in steady if r.server.model != TRACED_MODEL],
                )


if __name__ == "__main__":
    main()
