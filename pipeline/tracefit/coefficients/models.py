"""Coefficient files in use: load them, ask about steps and requests.

One question is answered in plain Python: neither numpy nor polars nor scikit-learn is imported for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

from tracefit.coefficients.answers import RequestAnswer, Span, StepAnswer
from tracefit.coefficients.ask import Told, ask, ask_work
from tracefit.coefficients.files import read_coefficients
from tracefit.coefficients.model import BoundaryModel, CoefficientFile, Model
from tracefit.coefficients.values import columns_of, row_of
from tracefit.coefficients.workload import (
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    RequestQuestion,
    StepQuestion,
    server_constants,
)
from tracefit.errors import UsageError
from tracefit.features.expressions import names_in, parse_formula

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import polars as pl

STEP_MODELS = ("beta.cycle_time", "beta.duration")
MAX_PREFILL_STEPS = 10_000
_FILES = ("alpha.json", "beta.json")


def load(*paths: str | Path) -> Models:
    """Read coefficient files.

    Args:
        paths: Files, or folders that hold alpha.json, beta.json or both.

    Raises:
        UsageError: A file is missing, damaged or of another kind, or two files hold the same model.
    """
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise UsageError("no coefficient file is given")
    return Models(tuple(read_coefficients(file) for file in files), ", ".join(str(p) for p in paths))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [path / name for name in _FILES if (path / name).exists()]
    if not found:
        raise UsageError(
            f"holds neither {' nor '.join(_FILES)}", where=str(path), hint="run `tracefit train` first"
        )
    return found


class Models:
    """The models of one or several coefficient files."""

    def __init__(self, files: tuple[CoefficientFile, ...], where: str = "models") -> None:
        self.files = files
        self.where = where
        self._by_scope: dict[str, dict[str, Model]] = {}
        for model in (m for file in files for m in file.models):
            scope = self._by_scope.setdefault(model.scope_id or "", {})
            if model.name in scope:
                raise UsageError(f"{model.name} of scope {model.scope_id} is there twice", where=where)
            scope[model.name] = model

    @property
    def scope_ids(self) -> tuple[str, ...]:
        """Scopes the files speak about, in order."""
        return tuple(self._by_scope)

    def scope(self, scope: str | None = None) -> ScopeModels:
        """Return the models of one scope.

        Args:
            scope: Its id or a part of it that only one has; may be left out where there is only one.

        Raises:
            UsageError: No scope or several match.
        """
        matching = [s for s in self._by_scope if scope is None or scope in s]
        exact = [s for s in matching if s == scope]
        found = exact or matching
        if len(found) != 1:
            what = (
                "several scopes are there"
                if scope is None
                else f"scope {scope} is {'no' if not found else 'not one'} scope here"
            )
            raise UsageError(
                what if self._by_scope else "no models are there",
                where=self.where,
                hint=f"name one with --scope: {', '.join(self._by_scope)}" if self._by_scope else None,
            )
        return ScopeModels(found[0] or None, self._by_scope[found[0]])

    def model(self, name: str, scope: str | None = None) -> Model:
        """Return a model by name.

        Raises:
            UsageError: It is not there.
        """
        return self.scope(scope).require(name)

    @overload
    def predict_step(self, rows: pl.DataFrame, *, scope: str | None = None) -> pl.DataFrame: ...

    @overload
    def predict_step(
        self,
        rows: None = None,
        *,
        scope: str | None = None,
        batch: float = 0,
        context: float = 0,
        prefill: float = 0,
        prefill_reqs: float | None = None,
        prefill_done: float = 0,
        waiting: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> StepAnswer: ...

    def predict_step(
        self,
        rows: pl.DataFrame | None = None,
        *,
        scope: str | None = None,
        batch: float = 0,
        context: float = 0,
        prefill: float = 0,
        prefill_reqs: float | None = None,
        prefill_done: float = 0,
        waiting: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> StepAnswer | pl.DataFrame:
        """Predict how long a step takes, or every step of a frame.

        Args:
            rows: A frame with timeline columns, or with columns named as the arguments below; gains `predicted_us`,
                `low_us`, `high_us` and `outside`.
            scope: See `scope`.
            batch: Decoding requests.
            context: Mean tokens in their caches.
            prefill: Prompt tokens computed in the step.
            prefill_reqs: Requests they belong to.
            prefill_done: Tokens of those prompts computed before.
            waiting: Requests in the queue.
            features: Columns or features by name; they win over what follows from the rest.

        Raises:
            UsageError: No model speaks of steps, or a feature it needs is not known.
        """
        chosen = self.scope(scope)
        if rows is not None:
            from tracefit.coefficients.frames import predict_steps

            return predict_steps(chosen.step_model, rows, chosen.server)
        question = StepQuestion(batch, context, prefill, prefill_reqs, prefill_done, waiting, features or {})
        return chosen.step(question)

    @overload
    def predict_request(self, rows: pl.DataFrame, *, scope: str | None = None) -> pl.DataFrame: ...

    @overload
    def predict_request(
        self,
        rows: None = None,
        *,
        scope: str | None = None,
        prompt_tokens: float,
        output_tokens: float,
        queue: float = 0,
        batch: float | None = None,
        context: float | None = None,
        cached: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> RequestAnswer: ...

    def predict_request(
        self,
        rows: pl.DataFrame | None = None,
        *,
        scope: str | None = None,
        prompt_tokens: float = 0,
        output_tokens: float = 0,
        queue: float = 0,
        batch: float | None = None,
        context: float | None = None,
        cached: float = 0,
        features: Mapping[str, float] | None = None,
    ) -> RequestAnswer | pl.DataFrame:
        """Predict queue wait, TTFT, ITL and E2E of a request, or of every request of a frame.

        Args:
            rows: A frame with columns named as the arguments below (prompt_tokens and output_tokens at least); gains
                one `*_us` column per part.
            scope: See `scope`.
            prompt_tokens: Prompt.
            output_tokens: Tokens to generate.
            queue: Requests waiting ahead.
            batch: Requests that run.
            context: Mean tokens in their caches.
            cached: Prompt tokens found in the prefix cache.
            features: Columns or features by name; they win over what follows from the rest.

        Raises:
            UsageError: The question makes no sense, or no model speaks of steps.
        """
        chosen = self.scope(scope)
        if rows is not None:
            from tracefit.coefficients.request_frames import predict_requests

            return predict_requests(chosen, rows)
        question = RequestQuestion(
            prompt_tokens, output_tokens, queue, batch, context, cached, features or {}
        )
        return chosen.request(question)


@dataclass(frozen=True, slots=True)
class ScopeModels:
    """The models of one scope by name."""

    scope_id: str | None
    models: Mapping[str, Model]

    def require(self, name: str) -> Model:
        """Return a model by name.

        Raises:
            UsageError: It is not there.
        """
        if name not in self.models:
            raise UsageError(
                f"no model {name} of scope {self.scope_id}",
                hint=f"there are: {', '.join(sorted(self.models))}",
            )
        return self.models[name]

    @property
    def step_model(self) -> Model:
        """The model of step times."""
        found = next((n for n in STEP_MODELS if n in self.models), STEP_MODELS[0])
        return self.require(found)

    @property
    def server(self) -> dict[str, float | None]:
        """Settings of the server by name, null where not known."""
        scope = next((m.scope for m in self.models.values() if m.scope is not None), None)
        return server_constants(scope)

    def setting(self, name: str) -> object:
        """Return any setting of the server as the files have it."""
        scopes = (m.scope for m in self.models.values() if m.scope is not None)
        return next((s.settings.get(name) for s in scopes), None)

    def step(self, question: StepQuestion, *, stand_in: bool = False) -> StepAnswer:
        """Predict a step."""
        model = self.step_model
        told = self._tell(model, question.inputs(), STEP_COLUMNS, question.features, stand_in=stand_in)
        return StepAnswer(
            self.scope_id, model.name, told.span, tuple(told.features.items()), told.assumed, told.outside
        )

    def _tell(
        self,
        model: Model,
        inputs: Mapping[str, float | None],
        columns: Mapping[str, str],
        features: Mapping[str, float],
        *,
        stand_in: bool,
        cycle_us: float | None = None,
    ) -> Told:
        row = row_of(model, {**self.server, **inputs, **features})
        row.formulas = {**columns, **row.formulas}
        if isinstance(model, BoundaryModel) and (cycle_us is not None or inputs.get("batch") == 0):
            return ask_work(model, row, cycle_us)
        return ask(model, row, stand_in=stand_in)

    def request(self, question: RequestQuestion) -> RequestAnswer:
        """Predict a request: overheads, queue wait, the steps of its prompt, and its decode steps."""
        inputs, said = question.inputs(self.server)
        batch, context = inputs["batch"] or 0.0, inputs["context"] or 0.0
        assumed, outside = list(said), list[str]()

        def step(decoding: float, tokens: float, prefill: float = 0, done: float = 0) -> Span:
            asked = StepQuestion(decoding, tokens, prefill, prefill_done=done, features=question.features)
            told = self.step(asked, stand_in=True)
            assumed.extend(told.assumed)
            outside.extend(told.outside)
            return told.step

        cycle = step(batch, context) if batch else None
        if cycle is not None:
            inputs["decode_cycle_us"] = cycle.value_us
        # The request decodes with the others, halfway through its output on average.
        own = question.prompt_tokens + question.output_tokens / 2
        beside = self.beside(batch)
        itl = step(beside + 1, (beside * context + own) / (beside + 1))
        chunks = self._chunks(question.prompt_tokens - question.cached, beside)
        prefill, done = Span(0.0, 0.0, 0.0), question.cached
        for chunk in chunks:
            prefill, done = prefill + step(beside, context, chunk, done), done + chunk
        if self.setting("async_scheduling") is True and cycle is not None:
            prefill = prefill + cycle
            assumed.append("scheduling runs a step ahead: the prompt waits one cycle more")

        def overhead(name: str, given: Mapping[str, float | None]) -> Span | None:
            if f"alpha.{name}" not in self.models:
                assumed.append(f"no model alpha.{name}: left out with what needs it")
                return None
            model = self.models[f"alpha.{name}"]
            us = cycle.value_us if cycle is not None else None
            told = self._tell(model, given, REQUEST_COLUMNS, question.features, stand_in=True, cycle_us=us)
            assumed.extend(told.assumed)
            outside.extend(told.outside)
            return told.span

        admission, wait = overhead("admission", inputs), overhead("queue_wait", inputs)
        departure = overhead("departure", {**inputs, "batch": beside + 1})
        if question.queue and wait is not None and not _knows_queues(self.models["alpha.queue_wait"]):
            outside.append(
                "alpha.queue_wait: nothing in it depends on the queue, no request waited in training"
            )
        ttft = None if admission is None or wait is None else admission + wait + prefill
        rest = itl.times(question.output_tokens - 1)
        return RequestAnswer(
            self.scope_id,
            admission,
            wait,
            prefill,
            itl,
            departure,
            ttft,
            None if ttft is None else ttft + rest,
            len(chunks),
            _once(assumed),
            _once(outside),
        )

    def beside(self, batch: float) -> float:
        """Return how many requests run beside one that runs: of a full batch one has to go first."""
        slots = self.server["max_num_seqs"]
        return batch if slots is None else max(min(batch, slots - 1), 0.0)

    def _chunks(self, tokens: float, batch: float) -> list[float]:
        """Cut a prompt into the tokens of each of its steps, by what the running requests leave of the budget."""
        budget = self.budget(batch)
        if budget is None:
            return [tokens]
        count = math.ceil(tokens / budget)
        if count > MAX_PREFILL_STEPS:
            raise UsageError(f"the prompt takes more than {MAX_PREFILL_STEPS:,} steps", where="prompt")
        return [min(budget, tokens - i * budget) for i in range(count)]

    def budget(self, batch: float) -> float | None:
        """Prompt tokens that a step has room for beside `batch` decoding requests; null where nothing cuts prompts."""
        limit = self.server["max_num_batched_tokens"]
        if limit is None or self.setting("enable_chunked_prefill") is False:
            return None
        return max(limit - batch, 1.0)


def _knows_queues(model: Model) -> bool:
    return any(
        "queue" in names_in(parse_formula(REQUEST_COLUMNS.get(c, c), where=c)) for c in columns_of(model)
    )


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
