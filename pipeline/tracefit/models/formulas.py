"""The language in which features are declared: numbers, names, + - * / **, min and max.

A formula is text from a file that anyone may have written. Python's own parser reads it, a whitelist of
syntax nodes turns it into a small tree (`Node`), and only that tree is evaluated, once compiled (`computation`), over
amounts (`amounts`): the floats of one row, or the arrays of many.

- an unknown operand makes the result unknown;
- a result that is not finite (overflow, NaN, a power of zero with a negative exponent) is unknown;
- division by zero gives 0, as the documentation of coefficient files says: without tokens or requests a ratio (a share
  of a step's tokens, a mean over its requests) means nothing, but the step itself still counts.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from tracefit.errors import UsageError
from tracefit.evaluator import LEXICON, MAX_EXPONENT, MAX_FORMULA_CHARS, MAX_NESTED_CALLS, TYPESET
from tracefit.models import amounts
from tracefit.models.amounts import Amount
from tracefit.server.documents import excerpt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

Operator = Literal["+", "-", "*", "/", "**"]
Function = Literal["min", "max"]

_OPERATORS: dict[type[ast.operator], Operator] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_SIGN_NODES = ast.UAdd | ast.USub  # `not` is one of Python's operators of one operand too


class Constant(msgspec.Struct, frozen=True):
    """A number."""

    value: float


class Name(msgspec.Struct, frozen=True):
    """A column or a constant, by name."""

    name: str


class Binary(msgspec.Struct, frozen=True):
    """Two formulas and an operator between them."""

    operator: Operator
    left: Node
    right: Node


class Call(msgspec.Struct, frozen=True):
    """The smallest or largest of several formulas."""

    function: Function
    arguments: tuple[Node, ...]


Node: TypeAlias = Constant | Name | Binary | Call


def parse_formula(text: str, *, where: str) -> Node:
    """Parse a formula.

    The typeset signs for times, divided by and minus are read as the operators they stand for.

    Raises:
        UsageError: Anything but numbers, names, operators, parentheses, `min(…)` and `max(…)`; an exponent that is
            not a number from -4 to 4, unless a number from 0 to 1 is raised to it; more than four nested calls.
    """
    if len(text) > MAX_FORMULA_CHARS:
        raise UsageError(f"formula is longer than {MAX_FORMULA_CHARS} characters", where=where)
    try:
        return _parsed(text)
    except (SyntaxError, RecursionError, MemoryError):  # the latter two for deep nesting
        problem = "cannot be parsed"
    except ValueError as error:
        problem = str(error)
    raise UsageError(
        f"formula {excerpt(text)!r} {problem}",
        where=where,
        hint="a formula has numbers, names, + - * / **, parentheses, min(…) and max(…)",
    )


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Node:
    """Parse a formula; a training asks for each of its few hundred many times."""
    plain = " ".join(text.translate(TYPESET).split())
    allowed = LEXICON.match(plain)
    end = allowed.end() if allowed else 0
    if end < len(plain):
        raise ValueError(f"has {plain[end]!r}, which is not allowed there")
    return _node(ast.parse(plain, mode="eval").body, calls=0)


def _node(tree: ast.expr, *, calls: int) -> Node:
    """Turn a syntax tree into a formula; `calls` is the nesting depth of min/max."""
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _constant(value)
        case ast.Name(id=name):
            return Name(name)
        case ast.UnaryOp(op=op) if isinstance(op, _SIGN_NODES):
            # A chain of signs is folded in a loop: it can be as long as the formula.
            negative = False
            while isinstance(tree, ast.UnaryOp) and isinstance(tree.op, _SIGN_NODES):
                negative ^= isinstance(tree.op, ast.USub)
                tree = tree.operand
            node = _node(tree, calls=calls)
            return Binary("-", Constant(0.0), node) if negative else node
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            base = _node(left, calls=calls)
            # A base up to 1 gives no huge numbers for any positive exponent; with any other base the exponent
            # must be small.
            is_small = isinstance(base, Constant) and base.value <= 1
            return Binary("**", base, _node(right, calls=calls) if is_small else _exponent(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return Binary(_OPERATORS[type(op)], _node(left, calls=calls), _node(right, calls=calls))
        case ast.Call(func=ast.Name(id="min" | "max" as function), args=[_, *_] as arguments, keywords=[]):
            if calls == MAX_NESTED_CALLS:
                raise ValueError(f"nests more than {MAX_NESTED_CALLS} calls")
            inner = tuple(_node(argument, calls=calls + 1) for argument in arguments)
            return Call("min" if function == "min" else "max", inner)
        case ast.Call(func=ast.Name(id=function), args=[_, *_], keywords=[]):
            raise ValueError(f"calls {excerpt(function)!r}; only min and max can be called")
        case _:
            raise ValueError("has more in it than is allowed")


def _constant(value: float) -> Constant:
    if not math.isfinite(_float(value)):
        raise ValueError("has a number out of range")
    return Constant(float(value))


def _float(value: float) -> float:
    """Return a number as a float: an integer of hundreds of digits is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _exponent(tree: ast.expr) -> Constant:
    number = tree.operand if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, _SIGN_NODES) else tree
    node = _node(number, calls=0) if isinstance(number, ast.Constant) else None
    if isinstance(node, Constant) and node.value <= MAX_EXPONENT:
        is_negative = isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub)
        return Constant(-node.value if is_negative else node.value)
    raise ValueError("has an exponent that is not a number from -4 to 4")


def names_in(node: Node) -> frozenset[str]:
    """Return the columns and constants a formula needs."""
    match node:
        case Name(name):
            return frozenset({name})
        case Binary(_, left, right):
            return names_in(left) | names_in(right)
        case Call(_, arguments):
            return frozenset().union(*(names_in(argument) for argument in arguments))
        case _:
            return frozenset()


# -- computing -------------------------------------------------------------------------------------------

Amounts: TypeAlias = Mapping[str, Amount]
"""Amounts by name: floats, arrays of one length, or both."""

Computation: TypeAlias = Callable[[Amounts], Amount]

_OPERATIONS: dict[Operator, Callable[[Amount, Amount], Amount]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": amounts.quotient,
    "**": amounts.power,
}


def computation(node: Node) -> Computation:
    """Return a function that computes a formula from the values of its names: a replay computes formulas a million
    times.

    It raises KeyError for a name without a value. Over arrays, numpy's warnings are the caller's to silence
    (`np.errstate`).
    """
    computed = _computation(node)
    return lambda values: amounts.finite(computed(values))


def _computation(node: Node) -> Computation:
    match node:
        case Constant(value):
            return lambda _: value
        case Name(name):
            return operator.itemgetter(name)
        case Binary(symbol, one, other):
            return _operation(_OPERATIONS[symbol], one, other)
        case Call(function, (one, other)):
            return _operation(amounts.smaller if function == "min" else amounts.larger, one, other)
        case Call(function, arguments):
            extreme = amounts.smallest if function == "min" else amounts.largest
            inner = [_computation(argument) for argument in arguments]
            return lambda values: extreme(*[one(values) for one in inner])


def _operation(operate: Callable[[Amount, Amount], Amount], one: Node, other: Node) -> Computation:
    """Return an operation on two nodes; a constant needs no call."""
    left, right = _computation(one), _computation(other)
    if isinstance(one, Constant):
        first = one.value
        return lambda values: operate(first, right(values))
    if isinstance(other, Constant):
        second = other.value
        return lambda values: operate(left(values), second)
    return lambda values: operate(left(values), right(values))


# -- formulas that build on each other -------------------------------------------------------------------

_MOST_PLANS = 64


@dataclass(frozen=True, slots=True)
class Formulas:
    """Parsed formulas by name, each after those it builds on.

    A value given by name replaces its formula, even if it is unknown.
    """

    nodes: Mapping[str, Node]
    needs: Mapping[str, frozenset[str]]
    """Name of each formula to the names in it; walking the nodes instead took a third of the time of a prediction."""
    _computations: dict[str, Computation] = field(default_factory=dict, repr=False)
    _plans: dict[tuple[frozenset[str], tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict, repr=False)

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

    def values(self, given: Amounts, names: Iterable[str]) -> dict[str, Amount]:
        """Return the given values, and those that the names are computed from, as far as they can be computed."""
        values = dict(given)
        for name in self._plan(frozenset(given), tuple(names)):
            values[name] = self.computation(name)(values)
        return values

    def computation(self, name: str) -> Computation:
        """Return the function that computes a formula; each is compiled once."""
        if name not in self._computations:
            self._computations[name] = computation(self.nodes[name])
        return self._computations[name]

    def _plan(self, given: frozenset[str], names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the formulas to compute, in order: a published model defines dozens of names, and one row uses a
        few.
        """
        key = given, names
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            used, there, plan = self.used(names, given), set(given), list[str]()
            for name in self.nodes:
                if name in used and name not in given and self.needs[name] <= there:
                    plan.append(name)
                    there.add(name)
            self._plans[key] = tuple(plan)
        return self._plans[key]
