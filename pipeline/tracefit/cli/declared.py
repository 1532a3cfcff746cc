"""Commands without input files: show the declared feature sets, and generate traces with known coefficients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from tracefit.cli.arguments import Json, Quiet
from tracefit.cli.program import app
from tracefit.console import Terminal, one_line_errors, show

_FORMATS: dict[str, tuple[Literal["json", "protobuf"], ...]] = {
    "json": ("json",),
    "protobuf": ("protobuf",),
    "both": ("json", "protobuf"),
}


@app.command()
def features(
    names: Annotated[
        Optional[list[str]],
        typer.Argument(help="Built-in sets or files; every built-in set if none is named."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the declared feature sets.

    Name, unit, formula and reason of every feature.

    Example: `tracefit features batch`
    """
    terminal = Terminal(quiet=False, task="features")
    with one_line_errors(terminal):
        from tracefit.commands.train import beta_feature_sets
        from tracefit.features.sets import BUILT_IN
        from tracefit.reports.terminal_results import features_text

        # As `train --features` reads them: what is shown here is what would be fitted.
        sets = [s for name in names or BUILT_IN for s in beta_feature_sets(name)]
        show(sets, features_text(sets), as_json=json, quiet=False)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")],
    name: Annotated[str, typer.Option(help="Name of the run folder.")] = "synth-run",
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    law: Annotated[
        Literal["linear", "roofline"],
        typer.Option(help="Step-time law; its coefficients are in truth.json."),
    ] = "linear",
    model: Annotated[str, typer.Option(help="Model preset, such as llama-8b.")] = "llama-8b",
    gpu: Annotated[str, typer.Option(help="GPU preset, such as H100.")] = "H100",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests per server.")] = 300,
    rate: Annotated[float, typer.Option(help="Mean arrivals per second.")] = 14.0,
    surge: Annotated[
        Optional[float],
        typer.Option(
            help="Factor on the arrivals in the last 30 % of the time, steady before; light, burst and heavy load if not "
            "given."
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=2, help="KV blocks; few of them cause a queue and preemptions.")
    ] = 4097,
    noise: Annotated[
        float, typer.Option(min=0, help="Sigma of the log-normal factor on a step's time.")
    ] = 0.03,
    step_sampling: Annotated[float, typer.Option(min=0, max=1, help="Share of steps traced.")] = 1.0,
    rich_sampling: Annotated[
        float, typer.Option(min=0, max=1, help="Share of traced steps with request snapshots.")
    ] = 0.0,
    journey_sampling: Annotated[float, typer.Option(min=0, max=1, help="Share of requests traced.")] = 1.0,
    duration: Annotated[
        Literal["schedule", "step"],
        typer.Option(help="What step.duration_us holds: time in schedule(), or the step's time."),
    ] = "schedule",
    queued_stamp: Annotated[
        Literal["step_start", "arrival"],
        typer.Option(help="QUEUED at the step start after the API work, or at the end of that work itself."),
    ] = "step_start",
    format_: Annotated[
        Literal["json", "protobuf", "both"],
        typer.Option("--format", help="JSON lines, framed protobuf, or a run folder of each."),
    ] = "json",
    compress: Annotated[
        Literal["none", "gz", "zst"], typer.Option(help="Compression of the trace files.")
    ] = "none",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate traces with known coefficients.

    They have the form of real traces, with the truth beside them.

    Example: `tracefit synth --out runs/ --requests 600 --law linear`
    """
    terminal = Terminal(quiet=quiet, task=f"synth to {out}")
    with one_line_errors(terminal):
        from tracefit.commands.generate import generate
        from tracefit.reports.terminal_results import synth_text
        from tracefit.synth import DEFAULT_PHASES, SynthOptions, surge_phases

        options = SynthOptions(
            name=name,
            seed=seed,
            law=law,
            model=model,
            gpu=gpu,
            tp=tp,
            requests=requests,
            rate_per_s=rate,
            phases=DEFAULT_PHASES if surge is None else surge_phases(surge),
            num_blocks=blocks,
            noise=noise,
            step_sampling=step_sampling,
            rich_sampling=rich_sampling,
            journey_sampling=journey_sampling,
            queued_stamp=queued_stamp,
            duration=duration,
        )
        result = generate(
            out,
            options,
            formats=_FORMATS[format_],
            compress=None if compress == "none" else compress,
            progress=terminal,
        )
        terminal.close()
        show(result, synth_text(result), as_json=json, quiet=quiet)
