"""Results of `train` and `run`: data like those in `results`, and the figures and coefficients that their files give.

They are in this room because it draws, and knows the rooms that read the files; `results` is data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.errors import EXIT_DONE, EXIT_QUARANTINE
from tracefit.results.models import DeploymentSummary, LatencySummary, MissingModels, ModelSummary
from tracefit.results.notebook import Shown
from tracefit.results.replays import RunReplay
from tracefit.results.requests import RequestGroup
from tracefit.results.traces import IngestResult

if TYPE_CHECKING:
    import polars as pl
    from plotly.graph_objects import Figure

    from tracefit.tables.store import RunTables


@dataclass(frozen=True, slots=True)
class TrainResult(Shown):
    """The models' folder, and their errors."""

    # Paths, not file contents: a notebook shows a result, and `report` and `load` open the files.
    models: Path
    files: tuple[Path, ...]
    evaluation: Path
    report: Path
    fitted: tuple[ModelSummary, ...]
    not_fitted: tuple[MissingModels, ...] = ()
    served: tuple[RequestGroup, ...] = ()
    """Latencies, requests and tokens of the servers in each run."""
    replays: tuple[RunReplay, ...] = ()
    """The held-out part of each run, replayed only from arrivals and lengths: latencies beside the measured ones."""
    latencies: tuple[LatencySummary, ...] = ()
    quarantined: bool = False
    deployments: tuple[DeploymentSummary, ...] = ()
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    """deployment_id to use to verdict: yes, with limits or no."""
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    """deployment_id to use to the first reason of its verdict."""
    tables: Path = field(default_factory=Path)
    """Folder of the tables that the models were fitted on."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user."""

    @property
    def exit_code(self) -> int:
        """0, or 3 when the ingested data has something in quarantine."""
        return EXIT_QUARANTINE if self.quarantined else EXIT_DONE

    def plot(self, figure: str = "step-times", *, deployment: str | None = None) -> Figure:
        """Draw a figure of the report with plotly.

        Args:
            figure: Its name, such as `step-times`, `error-by-load`, `step-breakdown`, `first-token` or
                `timeline`; the error for an unknown one lists all.
            deployment: A deployment, a part of its id, or the name of a run; optional if there is only one deployment.

        Raises:
            UsageError: There is no such figure or deployment.
            TracefitError: plotly is not installed.
        """
        # Imported here: a result is printed without the libraries that draw.
        from tracefit.reports.figures.named import draw

        return draw(self.evaluation, self.models, self.tables, figure, deployment)


@dataclass(frozen=True, slots=True)
class RunResult(Shown):
    """Result of the main job: ingest and train."""

    ingested: IngestResult
    trained: TrainResult
    out: Path = field(default_factory=Path)

    @property
    def exit_code(self) -> int:
        """0, or 3 when something is in quarantine."""
        # The higher is the worse of the two: both end in 0 or 3 here, and an error has raised before.
        return max(self.ingested.exit_code, self.trained.exit_code)

    def plot(self, figure: str = "step-times", *, deployment: str | None = None) -> Figure:
        """Draw a figure of the report with plotly; see `TrainResult.plot`."""
        return self.trained.plot(figure, deployment=deployment)

    @property
    def models(self) -> pl.DataFrame:
        """All numbers of all models, one per row; see `Models.coefficients`."""
        from tracefit.coefficients.models import load

        return load(self.trained.models).coefficients

    @property
    def evaluation(self) -> pl.DataFrame:
        """The held-out errors, one model per row, beside those of the training median and of gradient boosting."""
        import polars as pl

        return pl.DataFrame(self.trained.fitted)

    @property
    def tables(self) -> RunTables:
        """The tables of the runs that were read, by name: `result.tables["requests"]` is a polars frame."""
        # Imported here: a result is printed without polars.
        from tracefit.tables.store import RunTables

        return RunTables(self.ingested.tables, [r.run_id for r in self.ingested.runs])
