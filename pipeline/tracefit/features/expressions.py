"""The language in which features are declared: numbers, names, + - * / **, min and max.

A formula is text from a file that anyone may have written. Python's own parser reads it, a whitelist of
syntax nodes turns it into a small tree (`Node`), and only that tree is evaluated (`compiled`): in plain Python
over one row (`ROW`, which does not import polars) or as a polars expression over a frame (`columns.COLUMNS`).

Both give the same value for every input:

- a null operand makes the result null;
- a result that is not finite (overflow, NaN, a power of zero with a negative exponent) is null;
- division by zero gives 0, as the documentation of coefficient files says: without tokens or requests a ratio (a share
  of a step's tokens, a mean over its requests) means nothing, but the step itself still counts.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from operator import add, mul, sub
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from tracefit.errors import UsageError
from tracefit.evaluator import (
    COMPARE,
    LEXICON,
    MAX_EXPONENT,
    MAX_FORMULA_CHARS,
    MAX_NESTED_CALLS,
    TYPESET,
    power,
)
from tracefit.server.documents import excerpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Operator = Literal["+", "-", "*", "/", "**"]
Function = Literal["min", "max"]

_OPERATORS: dict[type[ast.operator], Operator] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_SIGNS = ast.UAdd | ast.USub  # `not` is one of Python's operators of one operand too

ARITHMETIC: dict[Operator, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul}
"""Operators that Python applies alike to numbers and to columns."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Name:
    """A column or a constant, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Binary:
    """Two formulas and an operator between them."""

    operator: Operator
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Call:
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
    plain = " ".join(text.translate(TYPESET).split())
    allowed = LEXICON.match(plain)
    end = allowed.end() if allowed else 0
    try:
        if end == len(plain):
            return _node(ast.parse(plain, mode="eval").body, calls=0)
        problem = f"has {plain[end]!r}, which is not allowed there"
    except (SyntaxError, RecursionError, MemoryError):  # the latter two for deep nesting
        problem = "cannot be parsed"
    except ValueError as error:
        problem = str(error)
    raise UsageError(
        f"formula {excerpt(text)!r} {problem}",
        where=where,
        hint="a formula has numbers, names, + - * / **, parentheses, min(…) and max(…)",
    )


def _node(tree: ast.expr, *, calls: int) -> Node:
    """Turn a syntax tree into a formula; `calls` is the nesting depth of min/max."""
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _constant(value)
        case ast.Name(id=name):
            return Name(name)
        case ast.UnaryOp(op=op) if isinstance(op, _SIGNS):
            # A chain of signs is folded in a loop: it can be as long as the formula.
            negative = False
            while isinstance(tree, ast.UnaryOp) and isinstance(tree.op, _SIGNS):
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
    number = tree.operand if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, _SIGNS) else tree
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


Operand = TypeVar("Operand")
Truth = TypeVar("Truth")


@dataclass(frozen=True, slots=True)
class Algebra(Generic[Operand, Truth]):
    """Operations to compute formulas, conditions and lines on the numbers of one row, or on the columns of a frame.

    Attributes:
        constant: A number as a value.
        binary: Operator to its function of two values; unknown if one of them is.
        extreme: The smallest or largest of several values; unknown if one of them is.
        finite: The value, unknown unless it is finite.
        compare: Whether a relation holds; false if a side is unknown.
        some: Whether one of several holds.
        every: Whether all of them hold.
    """

    constant: Callable[[float], Operand]
    binary: Mapping[Operator, Callable[[Operand, Operand], Operand]]
    extreme: Callable[[Function, Sequence[Operand]], Operand]
    finite: Callable[[Operand], Operand]
    compare: Callable[[str, Operand, Operand], Truth]
    some: Callable[[Sequence[Truth]], Truth]
    every: Callable[[Sequence[Truth]], Truth]


def compiled(node: Node, algebra: Algebra[Operand, Any]) -> Callable[[Callable[[str], Operand]], Operand]:
    """Return a function that computes a formula from `value_of`, its names: a replay computes formulas a million times."""
    finite, value = algebra.finite, _compiled(node, algebra)
    return lambda value_of: finite(value(value_of))


def _compiled(node: Node, algebra: Algebra[Operand, Any]) -> Callable[[Callable[[str], Operand]], Operand]:
    match node:
        case Constant(value):
            constant = algebra.constant(value)
            return lambda _: constant
        case Name(name):
            return lambda value_of: value_of(name)
        case Binary(operator, one, other):
            operate = algebra.binary[operator]
            left, right = _compiled(one, algebra), _compiled(other, algebra)
            return lambda value_of: operate(left(value_of), right(value_of))
        case Call(function, arguments):
            extreme, inner = algebra.extreme, [_compiled(argument, algebra) for argument in arguments]
            return lambda value_of: extreme(function, [one(value_of) for one in inner])


# -- one row ---------------------------------------------------------------------------------------------


def evaluate(node: Node, values: Mapping[str, float | None]) -> float | None:
    """Compute a formula for one row, in plain Python.

    Every name it needs is in `values`; None is null.

    Raises:
        KeyError: A name is not in `values`.
    """
    return compiled(node, ROW)(lambda name: None if (value := values[name]) is None else _float(value))


def _of_known(
    operate: Callable[[float, float], float],
) -> Callable[[float | None, float | None], float | None]:
    return lambda left, right: None if left is None or right is None else operate(left, right)


def _extreme(function: Function, arguments: Sequence[float | None]) -> float | None:
    numbers = [value for value in arguments if value is not None and not math.isnan(value)]
    if len(numbers) < len(arguments):
        return None
    return min(numbers) if function == "min" else max(numbers)


ROW: Algebra[float | None, bool] = Algebra(
    constant=float,
    binary={
        **{operator: _of_known(operate) for operator, operate in ARITHMETIC.items()},
        # As in the frame: x / inf is 0, as wanted, and 0 / 0 is not NaN.
        "/": _of_known(lambda left, right: left / (right or math.inf)),
        "**": _of_known(power),
    },
    extreme=_extreme,
    finite=lambda value: value if value is not None and math.isfinite(value) else None,
    compare=lambda relation, left, right: (
        left is not None and right is not None and bool(COMPARE[relation](left, right))
    ),
    some=any,
    every=all,
)
"""One row in plain Python; None is unknown."""
