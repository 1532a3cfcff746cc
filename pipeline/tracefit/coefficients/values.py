"""Feature values of one row, from what is given and what a coefficient file says of its own names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracefit.coefficients.model import BoundaryModel, RegimesModel
from tracefit.errors import UsageError
from tracefit.features.expressions import evaluate, names_in, parse_formula

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracefit.coefficients.model import Comparison, Linear, Model, Term

MAX_DEPTH = 50
"""Longest chain of definitions that is followed."""


def terms_of(model: Model | Linear) -> Iterator[Term]:
    """Terms of all parts of a model; of a boundary model those for consumers without a step clock too."""
    if isinstance(model, RegimesModel):
        for regime in model.regimes:
            yield from regime.terms
    elif isinstance(model, BoundaryModel):
        yield from model.work.terms
        yield from model.without_clock.terms
    else:
        yield from model.terms


def comparisons_of(model: Model) -> Iterator[Comparison]:
    """Comparisons of all conditions of a model."""
    if isinstance(model, RegimesModel):
        for regime in model.regimes:
            yield from regime.when.any or ()
            yield from regime.when.all or ()


def compared_names(model: Model) -> list[str]:
    """Names that the conditions compare, each once."""
    names = (n for c in comparisons_of(model) for n in (c.feature, c.feature2) if n)
    return list(dict.fromkeys(names))


def formulas_of(model: Model) -> dict[str, str]:
    """Name to formula of everything a model says how to compute: its definitions and its features."""
    features = {t.feature: t.formula for t in terms_of(model) if t.formula and t.formula != t.feature}
    return {**model.definitions, **features}


def columns_of(model: Model) -> set[str]:
    """Names a model needs to be given: what its formulas come down to."""
    formulas = formulas_of(model)
    wanted = {t.feature for t in terms_of(model)} | set(compared_names(model))
    columns: set[str] = set()
    seen: set[str] = set()
    while wanted:
        seen |= wanted
        columns |= {name for name in wanted if name not in formulas}
        inner = (names_in(parse_formula(formulas[n], where=n)) for n in wanted if n in formulas)
        wanted = set().union(*inner) - seen
    return columns


@dataclass(slots=True)
class Row:
    """Values of one row by name: given ones as they are, the others computed by formula, each once.

    Attributes:
        given: What is known; None is unknown.
        formulas: Name to formula for what is not given.
        where: What the formulas belong to, for errors.
    """

    given: Mapping[str, float | None]
    formulas: Mapping[str, str]
    where: str
    _known: dict[str, float | None] = field(default_factory=dict)

    def get(self, name: str, depth: int = 0) -> float | None:
        """Return a value, or None where it, or something it is computed from, is not known.

        Raises:
            UsageError: A formula is wrong, or definitions go round in a circle.
        """
        given = self.given.get(name)
        if given is not None:
            return float(given)
        if name not in self._known:
            self._known[name] = self._compute(name, depth)
        return self._known[name]

    def _compute(self, name: str, depth: int) -> float | None:
        formula = self.formulas.get(name)
        if formula is None:
            return None
        where = f"{self.where}, {name}"
        if depth > MAX_DEPTH:
            raise UsageError("is defined by itself, or by too long a chain", where=where)
        node = parse_formula(formula, where=where)
        return evaluate(node, {n: self.get(n, depth + 1) for n in names_in(node)})

    def missing(self, name: str) -> set[str]:
        """Names that would have to be given for `name` to be known."""
        lacking: set[str] = set()
        seen: set[str] = set()
        wanted = {name}
        while wanted:
            seen |= wanted
            bare = {n for n in wanted if n not in self.formulas and self.given.get(n) is None}
            lacking |= bare
            inner = (self.formulas[n] for n in wanted - bare if n in self.formulas)
            wanted = set().union(*(names_in(parse_formula(f, where=self.where)) for f in inner)) - seen
        return lacking


def row_of(model: Model, given: Mapping[str, float | None]) -> Row:
    """Return a row of a model's features."""
    return Row(given, formulas_of(model), model.name)
