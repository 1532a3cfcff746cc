"""Load coefficient files and predict steps and requests from them: the library's `tracefit.load`.

`Models` holds files and finds the models of a deployment; `predict` and `requests` compute single predictions,
`predict_frames` those of a frame. A single prediction is made in plain Python: neither numpy nor polars is
imported for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tracefit.coefficients.files import coefficient_paths, read_coefficients
from tracefit.errors import UsageError
from tracefit.inputs.buckets import location_of
from tracefit.models.deployment import DeploymentModels, StepPrediction
from tracefit.models.describe import REQUEST_INPUTS, STEP_INPUTS
from tracefit.models.request import RequestPrediction, predict_request
from tracefit.options import DeploymentOption, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import polars as pl

    from tracefit.coefficients.documents import CoefficientFile
    from tracefit.models.frames import FrameT, Rows
    from tracefit.models.schema import Model


def load(*paths: str | Path | Iterable[str | Path]) -> Models:
    """Read coefficient files.

    Args:
        paths: Files, or folders that have alpha.json, beta.json or both, directly or in `models/`; also
            lists of these.

    Raises:
        UsageError: A file is missing, damaged or of another kind, or two files hold the same model.

    Examples:
        >>> import tracefit
        >>> tracefit.load("out/").deployment_ids  # doctest: +ELLIPSIS
        ('llama-3.1-8b-instruct.h100-sxm.tp1...',)
    """
    locations = [location_of(p) for one in paths for p in ([one] if isinstance(one, str | Path) else one)]
    files = [file for location in locations for file in coefficient_paths(location)]
    if not files:
        raise UsageError("no coefficient file is given")
    return Models(tuple(read_coefficients(file) for file in files), ", ".join(map(str, locations)))


class Models:
    """The models of one or several coefficient files."""

    def __init__(self, files: tuple[CoefficientFile, ...], where: str = "models") -> None:
        self.files = files
        self.where = where
        by_deployment: dict[str, dict[str, Model]] = {}
        for model in (m for file in files for m in file.models):
            deployment = by_deployment.setdefault(model.deployment_id or "", {})
            # Otherwise the file read last would silently win.
            if model.name in deployment:
                twice = f"{model.name} of deployment {model.deployment_id} is there twice"
                raise UsageError(twice, where=where)
            deployment[model.name] = model
        # Cached, so that each model is compiled once for all predictions.
        self._deployments = {
            deployment_id: DeploymentModels(
                deployment_id or None,
                models,
                {r.latency: r for file in files for r in file.requests if r.deployment_id == deployment_id},
                tuple(m for file in files for m in file.not_fitted if m.deployment_id == deployment_id),
            )
            for deployment_id, models in by_deployment.items()
        }

    @classmethod
    def load(cls, *paths: str | Path | Iterable[str | Path]) -> Models:
        """Read coefficient files; see `load`."""
        return load(*paths)

    def __repr__(self) -> str:
        """Name the files and the models of each deployment."""
        deployments = "; ".join(
            f"{deployment}: {', '.join(one.models)}" for deployment, one in self._deployments.items()
        )
        return f"<Models of {self.where}: {deployments or 'none'}>"

    @property
    def deployment_ids(self) -> tuple[str, ...]:
        """Deployments with models in the files, in order."""
        return tuple(self._deployments)

    @property
    def coefficients(self) -> pl.DataFrame:
        """All numbers of all models, one per row, with unit, 95 % interval, training range and formula. Null means that
        a number has no such value.

        Examples:
            >>> import tracefit
            >>> tracefit.load("out/").coefficients.filter(model="beta.cycle_time")["term"].to_list()[:2]
            ['intercept', 'prefill_tokens']
        """
        import polars as pl

        from tracefit.models.schema import coefficient_rows

        rows = (row for file in self.files for model in file.models for row in coefficient_rows(model))
        return pl.DataFrame(list(rows), infer_schema_length=None)

    def deployment(self, deployment: str | None = None) -> DeploymentModels:
        """Return the models of one deployment.

        Args:
            deployment: Its id, or a part of it that no other deployment has; optional if there is only one deployment.

        Raises:
            UsageError: No deployment or several match.

        Examples:
            >>> import tracefit
            >>> sorted(tracefit.load("out/").deployment("llama").models)
            ['alpha.admission', 'alpha.departure', 'alpha.queue_wait', 'beta.cycle_time']
        """
        if not self._deployments:
            raise UsageError("no models are there", where=self.where)
        matching = [s for s in self._deployments if deployment is None or deployment in s]
        chosen = [s for s in matching if s == deployment] or matching
        if len(chosen) != 1:
            hint = f"name one with {named(DeploymentOption)}: {', '.join(chosen or self._deployments)}"
            match = "are there" if deployment is None else f"match {deployment}"
            raise UsageError(f"{len(chosen) or 'no'} deployments {match}", where=self.where, hint=hint)
        return self._deployments[chosen[0]]

    def model(self, name: str, deployment: str | None = None) -> Model:
        """Return a model by name.

        Raises:
            UsageError: No such model.

        Examples:
            >>> import tracefit
            >>> tracefit.load("out/").model("beta.cycle_time").terms[0].feature
            'prefill_tokens'
        """
        return self.deployment(deployment).require(name)

    @overload  # a frame may also be an iterable: the first signature that fits counts
    def predict_step(self, rows: FrameT, *, deployment: str | None = None) -> FrameT: ...  # type: ignore[overload-overlap]

    @overload
    def predict_step(self, rows: Rows, *, deployment: str | None = None) -> pl.DataFrame: ...

    @overload
    def predict_step(
        self,
        rows: None = None,
        *,
        deployment: str | None = None,
        batch: float = 0,
        context: float = 0,
        prefill: float = 0,
        prefill_reqs: float | None = None,
        prefill_done: float = 0,
        waiting: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> StepPrediction: ...

    def predict_step(
        self,
        rows: Rows | None = None,
        *,
        deployment: str | None = None,
        batch: float = 0,
        context: float = 0,
        prefill: float = 0,
        prefill_reqs: float | None = None,
        prefill_done: float = 0,
        waiting: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> Any:
        """Predict how long a step takes, or every step of a frame.

        Args:
            rows: A frame of polars, pandas, pyarrow or another library, columns by name, or one mapping per
                row; with timeline columns, or with columns named as the arguments below. The result adds
                `predicted_us`, `low_us`, `high_us` and `out_of_range`: a frame comes back as one of its own
                library, anything else, and a lazy frame, as polars. A null in a row gives a null prediction;
                a column that looks misspelt causes a warning.
            deployment: See `deployment`.
            batch: Decoding requests.
            context: Mean tokens in their caches.
            prefill: Prompt tokens computed in the step.
            prefill_reqs: Requests they belong to.
            prefill_done: Tokens of those prompts computed before.
            waiting: Requests in the queue.
            features: Columns or features by name; they win over what follows from the rest.

        Raises:
            DataError: The model of step times could not be fitted.
            UsageError: No such model, a required feature is missing, or the server runs no such step; for a
                frame the first such row is named, and no row is predicted.

        Examples:
            >>> import tracefit
            >>> models = tracefit.load("out/")
            >>> round(models.predict_step(batch=8, context=500, prefill=256).step.value_us, -3)
            14000.0
            >>> models.predict_step([{"batch": 8}, {"batch": 16}]).columns
            ['batch', 'predicted_us', 'low_us', 'high_us', 'out_of_range']
        """
        chosen = self.deployment(deployment)
        if rows is not None:
            from tracefit.models.frames import with_predictions

            return with_predictions(chosen, rows, "step")
        stated = (batch, context, prefill, prefill_reqs, prefill_done, waiting)
        return chosen.step(dict(zip(STEP_INPUTS, stated, strict=True)), features or {})

    @overload  # as of predict_step: a frame may also be an iterable
    def predict_request(self, rows: FrameT, *, deployment: str | None = None) -> FrameT: ...  # type: ignore[overload-overlap]

    @overload
    def predict_request(self, rows: Rows, *, deployment: str | None = None) -> pl.DataFrame: ...

    @overload
    def predict_request(
        self,
        rows: None = None,
        *,
        deployment: str | None = None,
        prompt_tokens: float,
        output_tokens: float,
        queue: float = 0,
        batch: float | None = None,
        context: float | None = None,
        cached: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> RequestPrediction: ...

    def predict_request(
        self,
        rows: Rows | None = None,
        *,
        deployment: str | None = None,
        prompt_tokens: float = 0,
        output_tokens: float = 0,
        queue: float = 0,
        batch: float | None = None,
        context: float | None = None,
        cached: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> Any:
        """Predict queue wait, TTFT, ITL and E2E of a request, or of every request of a frame.

        Args:
            rows: As in `predict_step`, with columns named as the arguments below, or as the flags
                (prompt_tokens or prompt, and output_tokens or output, at least). The result adds one `*_us`
                column per duration, `*_low_us` and `*_high_us` of TTFT, ITL and E2E, and `out_of_range`.
            deployment: See `deployment`.
            prompt_tokens: Prompt.
            output_tokens: Tokens to generate.
            queue: Requests waiting ahead.
            batch: Requests that run when it arrives.
            context: Mean tokens in their caches.
            cached: Prompt tokens in the prefix cache.
            features: Columns or features by name; they win over what follows from the rest.

        Raises:
            DataError: The model of step times could not be fitted.
            UsageError: No such model, or the server would refuse such a request; for a frame the first such
                row is named, and no row is predicted.

        Examples:
            >>> import tracefit
            >>> models = tracefit.load("out/")
            >>> request = models.predict_request(prompt_tokens=400, output_tokens=100, batch=8)
            >>> request.ttft.value_us < request.e2e.value_us
            True
            >>> models.predict_request([{"prompt_tokens": 400, "output_tokens": 100}]).columns[-1]
            'out_of_range'
        """
        chosen = self.deployment(deployment)
        if rows is not None:
            from tracefit.models.frames import with_predictions

            return with_predictions(chosen, rows, "request")
        stated = (prompt_tokens, output_tokens, queue, batch, context, cached)
        return predict_request(chosen, dict(zip(REQUEST_INPUTS, stated, strict=True)), features or {})
