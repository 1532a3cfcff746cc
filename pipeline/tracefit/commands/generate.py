"""Generate traces with known coefficients, as run folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.inputs.buckets import location_of
from tracefit.progress import NullProgress, Progress
from tracefit.results.models import SynthResult
from tracefit.synth import SynthOptions, synth, write_run

if TYPE_CHECKING:
    from tracefit.synth.options import CompressOption, FormatsOption, SynthOutOption
    from tracefit.synth.run import Format


_FORMATS: dict[str, tuple[Format, ...]] = {
    "json": ("json",),
    "protobuf": ("protobuf",),
    "both": ("json", "protobuf"),
}


def generate(
    out: SynthOutOption,
    options: SynthOptions,
    *,
    formats: FormatsOption = "json",
    compress: CompressOption = "none",
    progress: Progress | None = None,
) -> SynthResult:
    """Generate one run and write it below `out`, with its truth: a folder per format, `json` (lines) or `protobuf`
    (framed).

    Raises:
        UsageError: An option is out of range, or the folder cannot be written.
    """
    folder = location_of(out)
    (progress or NullProgress()).stage(f"generating {options.name}")
    run = synth(options)
    first = write_run(run, folder, formats=_FORMATS[formats], compress=None if compress == "none" else compress)
    # With both formats, protobuf has a run folder of its own: one folder would have every span twice.
    twins = [first.with_name(f"{first.name}-proto")] if formats == "both" else []
    return SynthResult((first, *twins), requests=run.truth_requests.height, steps=run.truth_steps.height)
