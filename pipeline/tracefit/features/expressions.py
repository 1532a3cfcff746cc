"""The language in which features are declared: numbers, names, + - * / **, min and max.

A formula is text from a file that anyone may have written. Python's own parser reads it, a whitelist of syntax nodes
turns it into a small tree (`Node`), and only that tree is evaluated: as a polars expression over a frame (`to_polars`)
or in plain Python over one row (`evaluate`, which does not import polars).

Both give the same value for every input:

- a null operand makes the result null;
- a result that is not finite (overflow, NaN, a power of zero with a negative exponent) is null;
- division by zero gives 0, as the coefficient file's documentation says: the ratios declared this way (a share of a
  step's tokens, a mean over its requests) describe nothing then, and the step itself still counts.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from operator import add, mul, sub
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tracefit.errors import UsageError
from tracefit.server.documents import excerpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import polars as pl

MAX_FORMULA_CHARS = 400  # twice what the longest roofline formula has
_MAX_EXPONENT = 4.0  # a token count of 10^6 stays far within a float
_MAX_NESTED_CALLS = 4  # a call doubles the polars expression it compiles to

# Numbers as JSON and every other language have them, ASCII names, operators. Python reads more (0x1f, 1_000, 1j,
# strings, other scripts): what is not here never gets to its parser.
_LEXICON = re.compile(
    r"(?:(?>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|[A-Za-z_]\w*+|[-+*/(), ])*+", re.ASCII
)
_TYPESET = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u2212": "-", "\u00f7": "/"})

Operator = Literal["+", "-", "*", "/", "**"]
Function = Literal["min", "max"]

_OPERATORS: dict[type[ast.operator], Operator] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_SIGNS = ast.UAdd | ast.USub  # `not` is one of Python's operators of one operand too

_ARITHMETIC: dict[Operator, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul}
"""What Python's operators do alike for numbers and for columns."""


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
    plain = " ".join(text.translate(_TYPESET).split())
    known = _LEXICON.match(plain)
    end = known.end() if known else 0
    try:
        if end == len(plain):
            return _node(ast.parse(plain, mode="eval").body, calls=0)
        problem = f"has {plain[end]!r}, which is not allowed there"
    except (
        SyntaxError,
        RecursionError,
        MemoryError,
    ):  # the latter two are how the parser reports deep nesting
        problem = "cannot be parsed"
    except ValueError as error:
        problem = str(error)
    raise UsageError(
        f"formula {excerpt(text)!r} {problem}",
        where=where,
        hint="a formula has numbers, names, + - * / **, parentheses, min(…) and max(…)",
    )


def _node(tree: ast.expr, *, calls: int) -> Node:
    """Turn a syntax tree into a formula; `calls` is how many min and max it is inside of."""
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
            # A base up to 1 gives no huge numbers for any positive exponent; with any other base the exponent must be small.
            is_small = isinstance(base, Constant) and base.value <= 1
            return Binary("**", base, _node(right, calls=calls) if is_small else _exponent(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return Binary(_OPERATORS[type(op)], _node(left, calls=calls), _node(right, calls=calls))
        case ast.Call(func=ast.Name(id="min" | "max" as function), args=[_, *_] as arguments, keywords=[]):
            if calls == _MAX_NESTED_CALLS:
                raise ValueError(f"nests more than {_MAX_NESTED_CALLS} calls")
            inner = tuple(_node(argument, calls=calls + 1) for argument in arguments)
            return Call("min" if function == "min" else "max", inner)
        case ast.Call(func=ast.Name(id=function), args=[_, *_], keywords=[]):
            raise ValueError(f"calls {excerpt(function)!r}; only min and max can be called")
        case _:
            raise ValueError("has more in it than is allowed")


def _constant(value: float) -> Constant:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("has a number out of range")
    return Constant(number)


def _exponent(tree: ast.expr) -> Constant:
    sign, number = 1.0, tree
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, _SIGNS):
        sign, number = -1.0 if isinstance(tree.op, ast.USub) else 1.0, tree.operand
    if isinstance(number, ast.Constant):
        node = _node(number, calls=0)
        if isinstance(node, Constant) and node.value <= _MAX_EXPONENT:
            return Constant(sign * node.value)
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


def to_polars(node: Node, constants: Mapping[str, float | None]) -> pl.Expr:
    """Compile a formula to a polars expression of type Float64.

    Args:
        node: The formula.
        constants: Names that are one value for the whole frame; None is null. Every other name is a column.
    """
    import polars as pl

    value = _expression(node, constants)
    return pl.when(value.is_finite()).then(value)


def _expression(node: Node, constants: Mapping[str, float | None]) -> pl.Expr:
    import polars as pl

    match node:
        case Constant(value):
            return pl.lit(value, dtype=pl.Float64)
        case Name(name):
            if name in constants:
                return pl.lit(constants[name], dtype=pl.Float64)
            # A column of texts has no numbers: its rows lack the feature.
            return pl.col(name).cast(pl.Float64, strict=False)
        case Binary(operator, left, right):
            return _binary(operator, _expression(left, constants), _expression(right, constants))
        case Call(function, arguments):
            return _extreme(function, [_expression(argument, constants) for argument in arguments])


def _binary(operator: Operator, left: pl.Expr, right: pl.Expr) -> pl.Expr:
    match operator:
        case "/":
            # A quotient by infinity is the 0 that is wanted; a null stays null. Adding 0 makes -0.0 into 0.0.
            return left / (right + 0.0).replace(0.0, math.inf)
        case "**":
            # Adding 0 as for a quotient: a power of -0.0 would have the other sign of infinity.
            return (left + 0.0).pow(right)
        case _:
            value: pl.Expr = _ARITHMETIC[operator](left, right)
            return value


def _extreme(function: Function, arguments: list[pl.Expr]) -> pl.Expr:
    import polars as pl

    # The horizontal functions skip nulls and NaN; a missing operand must not look like a small one.
    known = pl.all_horizontal(*(argument.is_not_null() & argument.is_not_nan() for argument in arguments))
    value = pl.min_horizontal(*arguments) if function == "min" else pl.max_horizontal(*arguments)
    return pl.when(known).then(value)


def evaluate(node: Node, values: Mapping[str, float | None]) -> float | None:
    """Compute a formula for one row, in plain Python; agrees with `to_polars`.

    Every name it needs is in `values`; None is null.

    Raises:
        KeyError: A name is not in `values`.
    """
    result = _value(node, values)
    return result if result is not None and math.isfinite(result) else None


def _value(node: Node, values: Mapping[str, float | None]) -> float | None:
    match node:
        case Constant(value):
            return value
        case Name(name):
            return _number(values[name])
        case Binary(operator, left, right):
            return _binary_value(operator, _value(left, values), _value(right, values))
        case Call(function, arguments):
            computed = [_value(argument, values) for argument in arguments]
            known = [value for value in computed if value is not None and not math.isnan(value)]
            if len(known) < len(computed):
                return None
            return min(known) if function == "min" else max(known)


def _number(value: float | None) -> float | None:
    try:
        return None if value is None else float(value)
    except OverflowError:  # an int of hundreds of digits
        return math.inf if value is not None and value > 0 else -math.inf


def _binary_value(operator: Operator, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    match operator:
        case "/":
            # The same detour as in the frame: x / inf is the 0 that is wanted, and 0 / 0 is not NaN.
            return left / (right or math.inf)
        case "**":
            return _power_value(left, right)
        case _:
            value: float = _ARITHMETIC[operator](left, right)
            return value


def _power_value(base: float, exponent: float) -> float:
    """Raise to a power; a result that is not real is NaN, one that is too large is infinite."""
    try:
        return math.pow(base, exponent)
    # What polars gives where Python raises.
    except OverflowError:
        return math.inf if base > 0 or exponent % 2 == 0 else -math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan
