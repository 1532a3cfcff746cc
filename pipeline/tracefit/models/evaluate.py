"""The evaluation of models: compiled once, then computed over the floats of one row or the arrays of many.

Only `evaluator.py`, a standalone file to copy, repeats it. Both have one contract:

- An empty `any` is false, an empty `all` is true.
- A feature without a value is unknown: a comparison with it does not hold, a sum with it is unknown too.
- A feature that is neither given nor computable is an error that names it, even if another comparison of the same
  condition decides.

A row needs the features of all conditions and of the form that predicts it, arrays those of all forms.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tracefit.errors import UsageError
from tracefit.evaluator import COMPARE
from tracefit.models.amounts import (
    Amount,
    Truth,
    all_of,
    any_of,
    anywhere,
    everywhere,
    filled,
    finite,
    is_known,
    largest,
    where,
)
from tracefit.models.formulas import Formulas
from tracefit.models.schema import (
    BoundaryModel,
    LinearForm,
    LinearModel,
    RegimesModel,
    linear_forms,
    terms_of,
)
from tracefit.models.targets import is_step_model
from tracefit.options import FeaturesOption, RowKindOption, RowsOption, named

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tracefit.models.formulas import Amounts
    from tracefit.models.schema import Comparison, Condition, Model, Number, Term

MAX_NAMES_SHOWN = 40
STEP_RESIDUAL = "step_residual_us"
"""Column of a training frame: time from a request's arrival to the next known step start; null when the
engine is idle."""


def line(intercept: Number, terms: Iterable[Term], values: Amounts) -> Amount:
    """Return intercept + sum of value * feature, not clipped; unknown if a feature is, or the sum is not finite."""
    total: Amount = intercept.value
    for term in terms:
        total = total + term.value * values.get(term.feature, math.nan)
    return finite(total)


def holds(condition: Condition, values: Amounts) -> Truth:
    """Return whether a condition holds."""

    def one(c: Comparison) -> Truth:
        right = values[c.feature2] if c.feature2 else c.value or 0.0
        return COMPARE[c.op](values[c.feature], right)

    either = [] if condition.any is None else [any_of([one(c) for c in condition.any])]
    return all_of([*either, *(one(c) for c in condition.all or ())])


def first_that_holds(conditions: Iterable[Condition], values: Amounts) -> Amount:
    """Return the index of the first condition that holds, -1 where none does."""
    index: Amount = -1
    for k, condition in reversed(list(enumerate(conditions))):
        index = where(holds(condition, values), k, index)
    return index


def admitted_us(start_us: Amount, done_us: Amount, offset_us: float) -> Amount:
    """Return the admission by the rule of the step boundary, in us after ARRIVED like both times; not below 0.

    Args:
        start_us: The first step start at or after the end of the API work; unknown if no step is waited for.
        done_us: That end.
        offset_us: QUEUED less the step start it comes before.
    """
    return largest(filled(start_us + offset_us, done_us), 0.0)


class Evaluated(NamedTuple):
    """A model evaluated: the sum of the form that predicts, not clipped, and what it was computed from.

    Attributes:
        amount: The sum in us; unknown if a feature of the form is, or no regime's condition holds.
        index: Index in `forms` of the one that predicts, -1 where none does.
        forms: The linear forms by name.
        values: Amounts by name: features, and the names they are computed from.
        replaced: Features of the one form that predicts, with the middle of the training range where they are unknown.
    """

    amount: Amount
    index: Amount
    forms: tuple[tuple[str, LinearForm], ...]
    values: Amounts
    replaced: Amounts

    @property
    def form(self) -> tuple[str, LinearForm]:
        """Name and linear form that predict one row."""
        return self.forms[self.index]


def middles(terms: Iterable[Term]) -> dict[str, float]:
    """Return the middle of the training range of every feature that has one."""
    ranges = ((t.feature, t.training_range) for t in terms)
    return {feature: (ends[0] + ends[1]) / 2 for feature, ends in ranges if ends is not None}


def _stand_ins(form: LinearForm, values: Amounts) -> dict[str, Amount]:
    """Return the features of a form that are unknown somewhere, with the middles of their training ranges there."""
    found = {name: (values.get(name, math.nan), middle) for name, middle in middles(form.terms).items()}
    return {name: filled(value, middle) for name, (value, middle) in found.items() if not everywhere(is_known(value))}


def _sum(forms: Sequence[tuple[str, LinearForm]], index: Amount, values: Amounts, *, stand_in: bool = False) -> Amount:
    """Return the line of the form that an index names, row by row; unknown where it names none."""
    amount: Amount = math.nan
    for k, (_, form) in enumerate(forms):
        chosen = index == k
        if anywhere(chosen):
            of_form = {**values, **_stand_ins(form, values)} if stand_in else values
            amount = where(chosen, line(form.intercept, form.terms, of_form), amount)
    return amount


_MOMENTS = ("state_age_us", STEP_RESIDUAL)
"""Features that describe the moment within a step at which a request arrives; all others are amounts."""


class CompiledModel:
    """A model that is ready to be evaluated."""

    def __init__(self, model: Model, columns: Mapping[str, str] | None = None) -> None:
        """Compile a model.

        Args:
            model: The model.
            columns: Formulas of table columns, see `describe`; those of the model win.

        Raises:
            UsageError: A formula is wrong, or formulas build on each other in a circle.
        """
        self.model = model
        self.columns = tuple(columns or ())
        terms = terms_of(model)
        # A term whose formula is its own name is a column.
        own = {t.feature: t.formula for t in terms if t.formula and t.formula != t.feature}
        self.formulas = Formulas.parse({**(columns or {}), **model.definitions, **own}, where=model.name)
        self.conditions = tuple(r.when for r in model.regimes) if isinstance(model, RegimesModel) else ()
        self.compared = tuple(dict.fromkeys(n for when in self.conditions for n in when.names))
        self.features = tuple(dict.fromkeys([*(t.feature for t in terms), *self.compared]))

    @cached_property
    def forms(self) -> tuple[tuple[str, LinearForm], ...]:
        """Name and linear form of each regime, or the one that predicts: of a boundary model, without a step clock."""
        forms = tuple(linear_forms(self.model).items())
        return forms if self.conditions else forms[-1:]

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs that the model needs."""
        return self.formulas.inputs(self.features)

    @cached_property
    def read(self) -> set[str]:
        """Names that change a prediction, its interval or its notes: features, and the names they are computed from."""
        return self.formulas.used([*self.features, *self.unmodeled])

    @cached_property
    def looked_at(self) -> set[str]:
        """The same names, and those that tell a step with prompts, by which errors were measured."""
        return self.read | self.formulas.used(["prefill_tokens"])

    @cached_property
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

    def evaluate(
        self, given: Amounts, *, stand_in: bool = False, only: tuple[str, LinearForm] | None = None
    ) -> Evaluated:
        """Evaluate the model; a boundary model as for a consumer without a step clock.

        Args:
            given: Its features, or the names they are computed from.
            stand_in: The middle of its training range stands in for an unknown feature of a term.
            only: Name and linear form to evaluate instead of those of the model.

        Raises:
            KeyError: A name that a condition compares has no value.
        """
        values = self.formulas.values(given, self.features)
        forms = self.forms if only is None else (only,)
        index = self.active(values) if only is None else 0
        replaced: Amounts = {}
        if stand_in and isinstance(index, int) and index >= 0:
            replaced = _stand_ins(forms[index][1], values)
        amount = _sum(forms, index, values, stand_in=stand_in)
        return Evaluated(amount, index, forms, {**values, **replaced}, replaced)

    def active(self, values: Amounts) -> Amount:
        """Return the index of the form that predicts, by the values of the compared names; -1 where no condition
        holds.
        """
        return first_that_holds(self.conditions, values) if self.conditions else 0

    def amount(self, values: Amounts) -> Amount:
        """Return the sum of the form that predicts over values of all its features, as `evaluate` does, and quicker."""
        if self.conditions:
            return _sum(self.forms, self.active(values), values)
        _, form = self.forms[0]
        return line(form.intercept, form.terms, values)

    def evaluate_with_clock(self, values: Amounts) -> Amount:
        """Return the prediction over a training frame: a boundary model uses only the next known step start.

        The value of `STEP_RESIDUAL` is that start; the prediction is unknown if the work runs past it.
        """
        model = self.model
        if not isinstance(model, BoundaryModel):
            return largest(self.evaluate(values).amount, 0.0)
        work, residual = (
            largest(line(model.work.intercept, model.work.terms, values), 0.0),
            values[STEP_RESIDUAL],
        )
        admitted = where(residual < work, math.nan, admitted_us(residual, work, model.offset.value))
        return admitted + 0.0 * work  # unknown where the work is

    @property
    def columns_with_clock(self) -> set[str]:
        """Names of the columns that `evaluate_with_clock` needs."""
        if isinstance(self.model, BoundaryModel):
            return {STEP_RESIDUAL, *(t.feature for t in self.model.work.terms)}
        return set(self.features)


def expected_at_boundary(model: BoundaryModel, work_us: Amount, cycle_us: Amount) -> tuple[Amount, Amount, Amount]:
    """Return expected, smallest and largest admission while steps of `cycle_us` run at unknown times.

    The boundary is equally likely at any time within a step: half a step later on average, a whole step at most.
    """
    soonest = largest(work_us + model.offset.value, 0.0)
    return soonest + cycle_us / 2, soonest, soonest + cycle_us
