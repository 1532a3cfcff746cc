"""Results of the commands that make models or use them.

They are separate from those of `traces`, because their parts take a while to import, which an ingest need not wait for.

Fields are what `--json` prints and what `schemas/results/` describes; a change of one is a change for the
programs that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracefit.errors import EXIT_DONE, EXIT_NOTHING, EXIT_QUARANTINE
from tracefit.results.notebook import Shown
from tracefit.results.replays import RunReplay

# -- train, report, synth ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeploymentSummary:
    """One deployment that was fitted: its runs, and the server's settings as text."""

    deployment_id: str
    runs: tuple[str, ...]
    settings: dict[str, str]
    record_minutes: int | None = None
    """Length of the recording that may give a yes on every use, as the report prescribes it; null if none may."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One fitted model in numbers."""

    name: str
    deployment_id: str
    # Medians first: a few rows near zero make any mean of percentages useless.
    holdout_mdape_pct: float | None
    holdout_p90_ape_pct: float | None
    holdout_mape_pct: float | None
    holdout_mae: float | None
    baseline_mae: float | None
    reference_mae: float | None
    skill: float | None
    rows_used: int
    rows_holdout: int
    of_means: bool = False
    """Whether the errors are of means over several steps, because no single step was measured."""
    is_negligible: bool = False
    """Whether it is a model of waits whose errors are under a millisecond, as those of a constant guess are."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Errors of one request latency, each on the held-out requests."""

    name: str
    deployment_id: str
    requests: int
    predicted_mdape_pct: float | None
    """Error of `predict` from the facts at a request's arrival."""
    predicted_p90_ape_pct: float | None
    baseline_mdape_pct: float | None
    """Error of the training median."""
    gradient_boosting_mdape_pct: float | None
    """Error of gradient boosting on the inputs of `predict`."""
    given_measured_state_mdape_pct: float | None
    """Error of the models with the measured queue and batches."""


@dataclass(frozen=True, slots=True)
class MissingModels:
    """Models of a deployment that were not fitted for the same reason, and what gives them."""

    deployment_id: str
    models: tuple[str, ...]
    reason: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class ReportResult(Shown):
    """The report's files, and its verdicts."""

    files: tuple[Path, ...]
    verdicts: dict[str, dict[str, str]]
    """deployment_id to use to verdict."""
    reasons: dict[str, dict[str, str]]
    """deployment_id to use to the reason of its verdict, in a sentence."""
    lead: str
    """Whether the models can be used, and how exact they are, in a sentence."""


@dataclass(frozen=True, slots=True)
class SynthResult(Shown):
    """The run folders that were generated."""

    folders: tuple[Path, ...]
    requests: int
    steps: int


# -- compare --------------------------------------------------------------------------------------------

DriftVerdict = Literal["good", "drifted", "unknown"]


@dataclass(frozen=True, slots=True)
class CoefficientDiff:
    """One coefficient in two files.

    Attributes:
        part: Regime, or linear form of the model.
        term: Feature, `intercept` or `offset`.
        unit: Unit of the values.
        first: Value in the first file, null if it is missing.
        first_ci95: Its interval.
        second: Value in the second file.
        second_ci95: Its interval.
        apart: Whether the intervals are disjoint; null if one is missing.
    """

    part: str
    term: str
    unit: str
    first: float | None
    first_ci95: tuple[float, float] | None
    second: float | None
    second_ci95: tuple[float, float] | None
    apart: bool | None


@dataclass(frozen=True, slots=True)
class PredictionDiff:
    """Difference of the predictions of one linear form over the range both files were trained on, second minus first.

    Attributes:
        part: Regime, or linear form of the model.
        points: Points of the shared range at which both predict.
        first_us: Mean prediction of the first file.
        mean_us: Mean difference.
        low_us: Largest decrease.
        high_us: Largest increase.
        ranges: Shared range of every column.
    """

    part: str
    points: int
    first_us: float
    mean_us: float
    low_us: float
    high_us: float
    ranges: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """One model in two files."""

    model: str
    deployment_id: str | None
    # Both: features that replace each other change coefficients, but no prediction.
    changes: tuple[CoefficientDiff, ...]
    shifts: tuple[PredictionDiff, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """One model of an old file on new traces.

    Like is compared with like: rows within the training range, of the source that the published error is of.

    Attributes:
        model: Its name.
        deployment_id: Its deployment.
        rows: Rows of the new traces it was evaluated on; idle gaps are left out.
        rows_outside: Rows outside its training range, or without a feature, which it was not evaluated on.
        then_mdape_pct: Median error it was published with: the larger one of its training and its held-out rows.
        now_mdape_pct: Median error on the new traces.
        then_mae_us: Mean absolute error it was published with.
        now_mae_us: Mean absolute error on the new traces.
        now_bias_pct: 100 * (sum predicted - sum actual) / sum actual on the new traces.
        limit_pct: The error above which it counts as drifted; for step times not below the noise of the machine in the
            new traces.
        verdict: good, drifted, or unknown if the new traces do not decide.
        reason: Why it is unknown.
        decides: Whether the verdict on the deployment depends on it: that of step times does, that of a single wait
            only where no run can be replayed and users feel the difference.
    """

    model: str
    deployment_id: str | None
    rows: int = 0
    rows_outside: int = 0
    then_mdape_pct: float | None = None
    now_mdape_pct: float | None = None
    then_mae_us: float | None = None
    now_mae_us: float | None = None
    now_bias_pct: float | None = None
    limit_pct: float | None = None
    # Three answers: too few rows neither confirm a file nor refute it.
    verdict: DriftVerdict = "unknown"
    reason: str | None = None
    decides: bool = True


@dataclass(frozen=True, slots=True)
class LatencyDrift:
    """A percentile of a latency in a new run, as measured and as replayed with the models of an old file.

    A replay has the arrivals and lengths of the run, and the queue, the batches and the steps from the models and the
    server's settings.

    Attributes:
        run_id: The run.
        deployment_id: Its deployment.
        name: ttft_p50_us, ttft_p90_us, itl_p50_us, ..., e2e_p90_us.
        requests: Requests that were compared.
        measured: As measured.
        replayed: Replayed with the file's step times.
        low: Least value over replays with these step times and with those at the speeds that the machine has in the
            run.
        high: Largest value over them.
        error_pct: 100 * (replayed - measured) / measured.
        limit_pct: By how many percent the larger of both may be above the other: what is good enough for every use, or
            more if the file was published with a larger error.
        verdict: good; drifted; or unknown if the machine's speed or a load beyond the training range may explain the
            error.
        reason: Why it is unknown.
    """

    run_id: str
    deployment_id: str | None
    name: str
    requests: int
    measured: float
    replayed: float
    low: float
    high: float
    error_pct: float | None
    limit_pct: float
    verdict: DriftVerdict
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ComparedLatency:
    """A latency of a point of a benchmark beside its prediction.

    Attributes:
        name: Such as ttft_mean or tpot_p99.
        measured_us: As the load generator measured it.
        predicted_us: The same latency of a replay of the load.
        error_pct: Predicted minus measured, in percent of the measured one.
    """

    name: str
    measured_us: float
    predicted_us: float
    error_pct: float | None


@dataclass(frozen=True, slots=True)
class ComparedPoint:
    """A point of a benchmark beside the prediction of its load.

    Attributes:
        number: Its number among the points, from 1.
        program: The program that wrote it, or table.
        file: The name of its file.
        concurrency: Requests at a time; null if they come at a rate.
        rate_per_s: Requests per second; null if each is sent when another one ends.
        prompt_tokens: Mean prompt.
        output_tokens: Mean output.
        latencies: Measured and predicted.
        reason: Why it is not compared; null if it is.
        deployment_id: The deployment whose models predict it; null if none does.
    """

    number: int
    program: str
    file: str
    concurrency: float | None
    rate_per_s: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    latencies: tuple[ComparedLatency, ...] = ()
    reason: str | None = None
    deployment_id: str | None = None


@dataclass(frozen=True, slots=True)
class CompareResult(Shown):
    """Differences of two files, the drift of one, or predictions beside the points of a benchmark.

    Attributes:
        first: The first file or folder.
        second: The second, the tables, or the points.
        points: Points of a benchmark with the predictions of their loads, if the second is points.
        models: Models that both files have.
        drift: Every model on the new traces, if the second is tables.
        latencies: Latencies that users see in the new runs, beside replays of these runs, if the second is tables.
        verdict: Verdict of the drift check: drifted if any deployment is, else unknown if any is, else good; null for
            two files. It rests on the latencies and the step times.
        reasons: Evidence for the verdict, if it is not good.
        notes: Models that could not be compared and runs that could not be replayed, with the reason.
    """

    first: Path
    second: Path
    models: tuple[ModelComparison, ...] = ()
    drift: tuple[Drift, ...] = ()
    latencies: tuple[LatencyDrift, ...] = ()
    verdict: DriftVerdict | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    points: tuple[ComparedPoint, ...] = ()

    @property
    def exit_code(self) -> int:
        """0; 1 if the old file has drifted or the new traces do not decide; 3 if some points are not compared."""
        if any(point.reason for point in self.points):
            return EXIT_QUARANTINE
        # An undecided check must not count as passed.
        return EXIT_NOTHING if self.verdict in ("drifted", "unknown") else EXIT_DONE


# -- export ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Error of an exported form on the hold-out, beside the training median's.

    Attributes:
        what: The quantity, in the consumer's words.
        unit: Unit of the errors.
        n: Held-out rows.
        mape_pct: Mean absolute percentage error.
        mae: Mean absolute error.
        bias_pct: 100 * (sum predicted - sum actual) / sum actual.
        baseline_mae: Mean absolute error of the training median on the same rows.
    """

    what: str
    unit: str
    n: int
    mape_pct: float | None
    mae: float | None
    bias_pct: float | None
    baseline_mae: float | None


@dataclass(frozen=True, slots=True)
class ExportResult(Shown):
    """Files written for a consumer, and the held-out error of the exported form.

    Attributes:
        consumer: Its name.
        deployment_id: The exported deployment.
        files: The files.
        errors: Held-out errors of the exported form.
        notes: Limits a user has to know.
        usage: The command that loads the files.
    """

    consumer: str
    deployment_id: str | None
    files: tuple[Path, ...]
    errors: tuple[HeldOut, ...]
    notes: tuple[str, ...]
    usage: str


# -- transfer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LawPart:
    """A coefficient of the law.

    Attributes:
        feature: Its term.
        unit: Its unit; 1 for a time at rated speed.
        value: Its value.
        low: Least value allowed.
        high: Largest value allowed; null without a limit.
        prior: Value expected before any step is seen.
        left_out_range: Its values over the laws that were fitted without one of the sources.
    """

    feature: str
    unit: str
    value: float
    low: float
    high: float | None
    prior: float
    left_out_range: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class LeftOutSource:
    """Mean errors in percent on a source that was left out, beside simpler answers.

    Attributes:
        left_out: The tensor parallelism, model or GPU that was left out.
        deployment_id: The deployment.
        mape_pct: Error of the law.
        prompts_mape_pct: Its error on steps with prompts.
        nearest_mape_pct: Error of the most similar source, its times unchanged.
        roofline_mape_pct: Error of the longer of compute and memory at the rated speed.
        own_mape_pct: Error of the deployment's own model on its hold-out.
        coverage_pct: Percent of its steps within the interval that the other sources give.
    """

    left_out: str
    deployment_id: str
    mape_pct: float | None
    prompts_mape_pct: float | None
    nearest_mape_pct: float | None
    roofline_mape_pct: float | None
    own_mape_pct: float | None
    coverage_pct: float | None


@dataclass(frozen=True, slots=True)
class TransferResult(Shown):
    """The model of a server that was never traced.

    Attributes:
        out: Folder of the files.
        deployment_id: The new server.
        origin: Where its model of step times comes from: transferred, calibrated or, where that is better, fitted.
        kind: Property of it that no source has: tensor_parallel, model or gpu.
        sources: The deployments it follows from.
        prior_sources: Deployments less like it, on which the priors of the law were found.
        tested: Whether servers left out of the sources show its errors.
        p90_ape_pct: Phase to the error in percent that nine of ten steps keep to.
        law: The coefficients.
        left_out: Errors on the sources, each left out in turn.
        borrowed: Models of the front end that are those of a source.
        notes: Limits a user has to know.
        files: The files.
        warnings: Warnings for the user.
    """

    out: Path
    deployment_id: str
    origin: str
    kind: str
    sources: tuple[str, ...]
    prior_sources: tuple[str, ...]
    tested: bool
    p90_ape_pct: dict[str, float]
    law: tuple[LawPart, ...]
    left_out: tuple[LeftOutSource, ...]
    borrowed: tuple[str, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    warnings: tuple[str, ...] = ()


# -- predict --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowPredictions(Shown):
    """Predictions for the rows of a file.

    Attributes:
        rows: Number of rows.
        out_of_range: Rows outside the training range.
        out: The file they were written to, or null.
        predictions: The rows with their predictions, if no output file was named.
    """

    rows: int
    out_of_range: int
    out: Path | None
    predictions: tuple[dict[str, object], ...] = ()


# -- replay ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayResult(Shown):
    """Runs replayed with the models that were fitted on the earlier part.

    Attributes:
        runs: One entry per run.
    """

    runs: tuple[RunReplay, ...]

    @property
    def exit_code(self) -> int:
        """0, or 1 if no run can be replayed."""
        return EXIT_DONE if any(run.quantities for run in self.runs) else EXIT_NOTHING


# -- verify ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that the refit does not confirm: its path in the file, the published value, the refitted one."""

    place: str
    in_file: str
    refitted: str


@dataclass(frozen=True, slots=True)
class VerifyResult(Shown):
    """Whether a refit of its inputs reproduces a coefficient file.

    Attributes:
        file: The file.
        verified: Every number confirmed.
        numbers: Numbers that were compared.
        inputs: Inputs that differ from those the file was made from.
        differing: Values that were not confirmed.
        differences: The first of them.
        notes: Other differences: program and library versions.
    """

    file: Path
    verified: bool
    numbers: int
    inputs: tuple[str, ...]
    differing: int
    # Not all of them: one wrong input changes every number of a file.
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0, or 1 if the file is not confirmed."""
        return EXIT_DONE if self.verified else EXIT_NOTHING
