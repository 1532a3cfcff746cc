"""Run the main job: traces to tables, coefficients, evaluation and report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.commands.ingest import IngestOptions, ServerOptions, ingest
from tracefit.commands.train import TrainOptions, train
from tracefit.results.training import RunResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.progress import Progress


def run(
    paths: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    server: ServerOptions | None = None,
    ingest_options: IngestOptions | None = None,
    options: TrainOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Ingest traces and train on them: OUT/tables, OUT/models, OUT/evaluation.json, OUT/report.md.

    Args:
        paths: One path or several: run folders, folders of run folders, or trace files.
        out: Where everything goes.
        server: Facts about the server beyond the run's files.
        ingest_options: Which parts of the traces to keep.
        options: How to train.
        workers: Most processes that decode traces; the number of cores if not given.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a file or an option is wrong.
        DataError: The traces cannot support a single model.
    """
    out = Path(out)
    ingested = ingest(
        paths, out / "tables", server=server, options=ingest_options, workers=workers, progress=progress
    )
    trained = train(
        out / "tables",
        out / "models",
        options=options,
        report_folder=out,
        # The folder may hold runs of earlier jobs: train on those of this one only.
        run_ids=[r.run_id for r in ingested.runs],
        progress=progress,
    )
    return RunResult(ingested, trained, out)
