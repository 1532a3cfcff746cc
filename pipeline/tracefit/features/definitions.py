"""Define the names in feature formulas, down to timeline columns, with the numbers of one server in them.

A coefficient file carries these definitions and can be evaluated without the model's config.json, the GPU catalogue or
tracefit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.features.expressions import names_in, parse_formula
from tracefit.features.roofline import number_text, roofline_formulas, work_formulas
from tracefit.features.training import constants_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.server.context import RunContext


def definitions(formulas: Iterable[str], context: RunContext) -> dict[str, str]:
    """Return the definition of every name in the formulas that is no column of a step or a request, in name order.

    Args:
        formulas: Formulas of features, or names of features.
        context: The server whose numbers the definitions hold.
    """
    known = {name: number_text(value) for name, value in constants_of(context).items() if value is not None}
    model, gpu = context.architecture, context.gpu
    tp = context.settings.tensor_parallel or 1
    if model is not None:
        known |= work_formulas(model, tp=tp)
    if model is not None and gpu is not None:
        known |= roofline_formulas(model, gpu, tp=tp)
    found: dict[str, str] = {}
    wanted = set().union(*(_names(formula) for formula in formulas))
    # A definition may use further names: repeat until no new one appears.
    while wanted := {name for name in wanted if name in known and name not in found}:
        found |= {name: known[name] for name in wanted}
        wanted = set().union(*(_names(found[name]) for name in wanted))
    return dict(sorted(found.items()))


def _names(formula: str) -> frozenset[str]:
    return names_in(parse_formula(formula, where="feature"))
