"""The evaluator of model files: a model is compiled once, then evaluated for a row or for a frame.

Formulas become expression nodes (`features.expressions`) in the order in which they build on each other.
Formulas, conditions and lines (`fit.results`) are written once, over an `Algebra`: numbers of a row or
columns of a frame. Only `evaluator.py`, a standalone file to copy, repeats this. All evaluators share one
contract:

- An empty `any` is false, an empty `all` is true.
- A feature without a value (null or NaN) is unknown: a comparison with it does not hold, a sum with it is unknown too.
- A feature that is neither given nor computable is an error that names it, even if another comparison of the same
  condition decides.

They differ in one point: a row needs the features of all conditions and of its active linear form, a frame those of all
forms.

polars is imported only to evaluate frames, not single rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from tracefit.coefficients.model import BoundaryModel, LinearForm, LinearModel, Regime, RegimesModel
from tracefit.errors import UsageError
from tracefit.features.expressions import ROW, evaluate, names_in, parse_formula
from tracefit.features.targets import is_step_model
from tracefit.fit.results import Term, admitted_us, line_expression
from tracefit.options import FeaturesOption, RowKindOption, RowsOption, named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import polars as pl

    from tracefit.coefficients.model import Model
    from tracefit.features.expressions import Node
    from tracefit.fit.results import Number

MAX_NAMES_SHOWN = 40
STEP_RESIDUAL = "step_residual_us"
"""Column of a training frame: time from a request's arrival to the next known step start; null when the
engine is idle."""


# -- the linear forms of a model ---------------------------------------------------------------------------


def linear_forms(model: Model | LinearForm) -> dict[str, LinearForm]:
    """Return the linear forms of a model by name: one per regime, or `work` and `without_clock`, or `line`."""
    if isinstance(model, RegimesModel):
        return {regime.name: regime for regime in model.regimes}
    if isinstance(model, BoundaryModel):
        return {"work": model.work, "without_clock": model.without_clock}
    return {"line": model}


def main_forms(model: Model) -> dict[str, LinearForm]:
    """Return the linear forms of predictions with a step clock: all except `without_clock`."""
    forms = linear_forms(model)
    return {"work": forms["work"]} if isinstance(model, BoundaryModel) else forms


def terms_of(model: Model) -> list[Term]:
    """Return the terms of all linear forms of a model, including those for consumers without a step clock."""
    return [term for form in linear_forms(model).values() for term in form.terms]


_CLOCK = {"work": "step starts known", "without_clock": "step starts unknown"}


def numbers_of(model: Model) -> dict[tuple[str, str, str], Number | Term]:
    """Return the numbers of a model by linear form, name and unit."""
    numbers: dict[tuple[str, str, str], Number | Term] = {}
    for part, form in linear_forms(model).items():
        numbers[part, "intercept", "us"] = form.intercept
        numbers |= {(part, term.feature, term.unit): term for term in form.terms}
        # The offset is added after the boundary, so it is not a term of the work.
        if isinstance(model, BoundaryModel) and part == "work":
            numbers[part, "offset", "us"] = model.offset
    return numbers


def coefficient_rows(model: Model) -> Iterator[dict[str, object]]:
    """Yield one row per number of a model: its linear form and condition, name, unit, value, interval and training range."""
    forms = linear_forms(model)
    for (part, name, unit), number in numbers_of(model).items():
        form, term = forms[part], number if isinstance(number, Term) else None
        bounds = (number.ci95, term and term.training_range)
        low, high, least, most = (end for pair in bounds for end in pair or (None, None))
        yield {
            "deployment_id": model.deployment_id,
            "model": model.name,
            "part": part,
            "condition": form.when.text() if isinstance(form, Regime) else _CLOCK.get(part),
            "term": name,
            "unit": unit,
            "value": number.value,
            "ci95_low": low,
            "ci95_high": high,
            "training_min": least,
            "training_max": most,
            "formula": term and term.formula,
        }


# -- formulas --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Formulas:
    """Parsed formulas by name, each after those it builds on.

    A value given by name replaces its formula, even if it is null.
    """

    nodes: Mapping[str, Node]
    needs: Mapping[str, frozenset[str]]
    """Name of each formula to the names in it; walking the nodes instead took a third of the time of a prediction."""

    @classmethod
    def parse(cls, texts: Mapping[str, str], *, where: str) -> Formulas:
        """Parse formulas.

        Args:
            texts: Name to formula.
            where: Source of the formulas, for errors.

        Raises:
            UsageError: A formula is wrong, or formulas build on each other in a circle.
        """
        nodes = {name: parse_formula(text, where=f"{where}, {name}") for name, text in texts.items()}
        needs = {name: frozenset(names_in(node)) for name, node in nodes.items()}
        inner = {name: names & nodes.keys() for name, names in needs.items()}
        try:
            order = list(TopologicalSorter(inner).static_order())
        except CycleError as error:
            raise UsageError("is defined by itself", where=f"{where}, {error.args[1][0]}") from None
        return cls({name: nodes[name] for name in order}, needs)

    def used(self, names: Iterable[str], given: Collection[str] = ()) -> set[str]:
        """Return the names themselves and everything they are computed from; `given` names are not expanded."""
        used: set[str] = set()
        wanted = set(names)
        while wanted:
            used |= wanted
            computed = (self.needs[n] for n in wanted if n in self.nodes and n not in given)
            wanted = set().union(*computed) - used
        return used

    def inputs(self, names: Iterable[str], given: Collection[str] = ()) -> set[str]:
        """Return the names at the end of all definitions: those that are given, or have no formula."""
        return {n for n in self.used(names, given) if n in given or n not in self.nodes}

    def missing(self, names: Iterable[str], given: Collection[str]) -> list[str]:
        """Return the names that are missing, sorted: neither given nor computable."""
        return sorted(self.inputs(names, given) - set(given))

    def row(self, given: Mapping[str, float | None], names: Iterable[str]) -> dict[str, float | None]:
        """Compute names of one row; all of them must be computable."""
        # Only the formulas these names need: a published model defines dozens of names, and one row uses a few.
        used = self.used(names, given)
        values = {n: _float_or_null(n, given[n]) for n in used if n in given}
        for name, node in self.nodes.items():
            if name in used and name not in given:
                values[name] = evaluate(node, values)
        return values

    def frame(self, rows: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
        """Add the columns of the names, and of the names they build on, as far as they can be computed.

        Raises:
            UsageError: A needed column is not numeric.
        """
        import polars as pl

        from tracefit.features.columns import to_polars

        columns = set(rows.columns)
        used = self.used(names, columns)
        numbers = {
            name for name, kind in rows.schema.items() if kind.is_numeric() or kind in (pl.Boolean, pl.Null)
        }
        if wrong := sorted(used & columns - numbers):
            raise UsageError("is not a column of numbers", where=wrong[0])
        # One column after the other, so that a shared definition is computed once. Each is computed from a
        # frame of its own inputs: adding columns to the full frame costs time in proportion to its width.
        computed: dict[str, pl.Series] = {}
        for name, node in self.nodes.items():
            needed = self.needs[name]
            if name in used and name not in columns and needed <= columns:
                inputs = pl.DataFrame([computed[n] if n in computed else rows[n] for n in sorted(needed)])
                value = inputs.select(to_polars(node, {}).alias(name)).to_series()
                computed[name] = value if needed else value.new_from_index(0, rows.height)
                columns.add(name)
        return rows.with_columns(computed.values())


def _float_or_null(name: str, value: float | None) -> float | None:
    """Return a value of a row as a float; NaN is null, as in a frame."""
    try:
        return None if value is None or math.isnan(value) else float(value)
    except (TypeError, OverflowError):  # text, or an integer of hundreds of digits
        raise UsageError("is not a number", where=name) from None


# -- the model -------------------------------------------------------------------------------------------


_MOMENTS = ("state_age_us", "step_residual_us")
"""Features that describe the moment within a step at which a request arrives; all others are amounts."""


class CompiledModel:
    """A model that is ready to be evaluated."""

    def __init__(self, model: Model, columns: Mapping[str, str] | None = None) -> None:
        """Compile a model.

        Args:
            model: The model.
            columns: Formulas of table columns, see `workload`; those of the model win.

        Raises:
            UsageError: A formula is wrong, or formulas build on each other in a circle.
        """
        self.model = model
        self.columns = tuple(columns or ())
        terms = terms_of(model)
        # A term whose formula is its own name is a column.
        own = {t.feature: t.formula for t in terms if t.formula and t.formula != t.feature}
        self.formulas = Formulas.parse({**(columns or {}), **model.definitions, **own}, where=model.name)
        regimes = model.regimes if isinstance(model, RegimesModel) else ()
        self.compared = tuple(dict.fromkeys(n for regime in regimes for n in regime.when.names))
        self.features = tuple(dict.fromkeys([*(t.feature for t in terms), *self.compared]))

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs that the model needs."""
        return self.formulas.inputs(self.features)

    @property
    def read(self) -> set[str]:
        """Names that change a prediction or its notes: features, and the names they are computed from."""
        return self.formulas.used([*self.features, *self.unmodeled])

    @property
    def unmodeled(self) -> dict[str, tuple[float, float]]:
        """Training ranges of features without a term in a linear model: predictions outside extrapolate."""
        if not isinstance(self.model, LinearModel):
            return {}
        left_out = ((x.feature, x.training_range) for x in self.model.features_left_out)
        apart = {*self.features, *_MOMENTS}
        return {name: ends for name, ends in left_out if ends is not None and name not in apart}

    def require(self, names: Iterable[str], given: Collection[str]) -> None:
        """Check that names can be computed from the given ones.

        Raises:
            UsageError: They cannot; the line names the missing inputs.
        """
        if missing := self.formulas.missing(names, given):
            raise self.lacks(missing, given)

    def lacks(self, missing: Iterable[str], given: Collection[str]) -> UsageError:
        """Return the error for missing inputs: their names, and the columns that can replace them."""
        names = sorted(missing)
        used = self.formulas.used(self.features, given)
        instead = [n for n in self.columns if n in used and not self.formulas.inputs([n]).isdisjoint(names)]
        also = f" (or {' or '.join(instead)} instead)" if instead else ""
        listed = ", ".join(sorted(given)[:MAX_NAMES_SHOWN]) or "nothing"
        how = f"give it{also} with {named(FeaturesOption)}, or as a column of {named(RowsOption)}"
        if is_step_model(self.model.name) and not {"prompt", "prompt_tokens"}.isdisjoint(given):
            how = f"for rows that are requests, {named(RowKindOption)} is request"
        return UsageError(
            f"{self.model.name} needs {', '.join(names)}, which is not given", hint=f"{how}; given: {listed}"
        )

    # -- one row

    def active(self, values: Mapping[str, float | None]) -> tuple[str, LinearForm]:
        """Return the name and the linear form that predicts a row; for a boundary model, without a step clock.

        Args:
            values: Value of each compared name.

        Raises:
            UsageError: No regime's condition holds.
        """
        if isinstance(self.model, RegimesModel):
            for regime in self.model.regimes:
                if regime.when.holds(values.__getitem__, ROW):
                    return regime.name, regime
            raise UsageError(f"no regime of {self.model.name} holds for these features")
        # The last form of a boundary model is `without_clock`.
        name, form = list(linear_forms(self.model).items())[-1]
        return name, form

    # -- a frame

    def computed(
        self, rows: pl.DataFrame, also: Iterable[str] = (), features: Iterable[str] | None = None
    ) -> pl.DataFrame:
        """Return the rows with a column for every feature, as floats; NaN is null.

        Args:
            rows: The features, or the columns they are computed from.
            also: Names that are computed too, if possible.
            features: The features to compute; all by default.

        Raises:
            UsageError: A column is missing or not numeric.
        """
        import polars as pl

        features = self.features if features is None else tuple(features)
        self.require(features, rows.columns)
        # In polars NaN is larger than every number, so a comparison with it would hold.
        given = self.formulas.used([*features, *also], rows.columns)
        rows = rows.with_columns(
            pl.col(n).fill_nan(None) for n, kind in rows.schema.items() if n in given and kind.is_float()
        )
        frame = self.formulas.frame(rows, [*features, *also])
        names = dict.fromkeys([*features, *(n for n in also if n in frame.columns)])
        return frame.with_columns(pl.col(n).cast(pl.Float64) for n in names)

    def by_regime(self, values: Sequence[pl.Expr]) -> pl.Expr:
        """Choose among expressions, one per linear form, as `active` does; null if no condition holds."""
        import polars as pl

        if not isinstance(self.model, RegimesModel):
            return values[-1]
        chosen: pl.Expr = pl.lit(None)
        # From the last regime to the first: the outermost condition is evaluated first.
        for regime, value in reversed(list(zip(self.model.regimes, values, strict=True))):
            chosen = pl.when(regime.when.expression()).then(value).otherwise(chosen)
        return chosen

    def expression(self) -> pl.Expr:
        """Return the model over its features' columns, clipped at 0; a boundary model without a step clock.

        The prediction is null if a feature of the active form is null, or no regime's condition holds.
        """
        forms = linear_forms(self.model).values()
        return self.by_regime(
            [line_expression(form.intercept, form.terms).clip(lower_bound=0.0) for form in forms]
        )

    def expression_with_clock(self) -> pl.Expr:
        """Return the model over a training frame: a boundary model uses only the next known step start.

        The column `STEP_RESIDUAL` has that start; the prediction is null if the work runs past it.
        """
        import polars as pl

        model = self.model
        if not isinstance(model, BoundaryModel):
            return self.expression()
        work, residual = line_expression(model.work.intercept, model.work.terms), pl.col(STEP_RESIDUAL)
        work = work.clip(lower_bound=0.0)
        return pl.when(residual.is_null() | (residual >= work)).then(
            admitted_us(residual, work, model.offset.value)
        )

    @property
    def columns_with_clock(self) -> set[str]:
        """Names of the columns that `expression_with_clock` needs."""
        if isinstance(self.model, BoundaryModel):
            return {STEP_RESIDUAL, *(t.feature for t in self.model.work.terms)}
        return set(self.features)


def expected_at_boundary(
    model: BoundaryModel, work_us: Any, cycle_us: Any, most: Callable[[Any, Any], Any] = max
) -> tuple[Any, Any, Any]:
    """Return expected, smallest and largest admission while steps of `cycle_us` run at unknown times.

    The boundary is equally likely at any time within a step: half a step later on average, a whole step at most. All
    arguments are numbers or arrays; `most` is the maximum function for them.
    """
    soonest = most(work_us + model.offset.value, 0.0)
    return soonest + cycle_us / 2, soonest, soonest + cycle_us
