"""The little language in which features are declared: numbers, names, + - * / **, min and max.

polars is imported only where a formula is compiled to it: a single row is computed without.

A formula is text from a file that anyone may have written, so it is parsed here, into a small tree, and only that
tree is ever computed: as a polars expression over a frame, or in plain Python over one row.

A null operand makes the result null. Division by zero gives 0: the ratios declared this way (a share of a
step's tokens, a mean over its requests) are of nothing then, and the step itself still counts.
A result that is not finite is null.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from tracefit.errors import UsageError
from tracefit.server.documents import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import polars as pl

_MAX_CHARS = 400
_MAX_DEPTH = 40
_MAX_EXPONENT = 4.0
_CALL_DEPTH = 10  # a call doubles the expression it compiles to, so that four of them may be nested
_NO_ATOMS = frozenset({"+", "-", "*", "/", "**", ")", ","})
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)|([A-Za-z_]\w*)|(\*\*|[-+*/(),]))", re.ASCII
)
_TYPESET = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u2212": "-", "\u00f7": "/"})

Operator = Literal["+", "-", "*", "/", "**"]
Function = Literal["min", "max"]


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

    Args:
        text: The formula, at most 400 characters.
        where: File and feature it stands in, for errors.

    Raises:
        UsageError: Anything but numbers, names, operators, parentheses, `min(…)` and `max(…)`; an exponent that
            is not a number from -4 to 4, unless a number from 0 to 1 is raised to it; nesting deeper than 40.
    """
    if len(text) > _MAX_CHARS:
        raise UsageError(f"formula is longer than {_MAX_CHARS} characters", where=where)
    parser = _Parser(list(_tokens(text.translate(_TYPESET), where=where)), text, where)
    node = parser.sum(0)
    if parser.peek() is not None:
        raise parser.unexpected()
    return node


def _tokens(text: str, *, where: str) -> Iterator[str]:
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            bad = text[position:].strip()[0]
            raise UsageError(f"formula {excerpt(text)!r} has {bad!r}, which is not allowed", where=where)
        yield match[0].strip()
        position = match.end()


@dataclass(slots=True)
class _Parser:
    """Recursive descent over sums, products, signs, powers and atoms, in that order of binding."""

    tokens: list[str]
    text: str
    where: str
    position: int = 0

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str | None:
        symbol = self.peek()
        self.position += 1
        return symbol

    def unexpected(self) -> UsageError:
        symbol = self.peek()
        what = "ends too early" if symbol is None else f"has {excerpt(symbol)!r} where it makes no sense"
        return UsageError(f"formula {excerpt(self.text)!r} {what}", where=self.where)

    def expect(self, symbol: str) -> None:
        if self.peek() != symbol:
            raise self.unexpected()
        self.position += 1

    def sum(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise UsageError(f"formula {excerpt(self.text)!r} is nested too deeply", where=self.where)
        node = self.product(depth)
        while (symbol := self.peek()) in {"+", "-"}:
            self.position += 1
            node = Binary("+" if symbol == "+" else "-", node, self.product(depth))
        return node

    def product(self, depth: int) -> Node:
        node = self.signed(depth)
        while (symbol := self.peek()) in {"*", "/"}:
            self.position += 1
            node = Binary("*" if symbol == "*" else "/", node, self.signed(depth))
        return node

    def signed(self, depth: int) -> Node:
        sign = 1
        while self.peek() in {"+", "-"}:
            sign = -sign if self.take() == "-" else sign
        node = self.power(depth)
        return node if sign > 0 else Binary("-", Constant(0.0), node)

    def power(self, depth: int) -> Node:
        base = self.atom(depth)
        if self.peek() != "**":
            return base
        self.position += 1
        if isinstance(base, Constant) and base.value <= 1:
            # A share that decays with a count: it cannot explode for any count there is.
            return Binary("**", base, self.atom(depth))
        return Binary("**", base, self.exponent())

    def exponent(self) -> Constant:
        """Take a plain number: a power that is computed can be made to explode."""
        sign = -1.0 if self.peek() == "-" else 1.0
        self.position += self.peek() in {"+", "-"}
        symbol = self.peek() or ""
        if not (symbol[:1].isdigit() or symbol.startswith(".")) or float(symbol) > _MAX_EXPONENT:
            raise UsageError(
                f"formula {excerpt(self.text)!r} has an exponent that is not a number from -4 to 4",
                where=self.where,
            )
        self.position += 1
        return Constant(sign * float(symbol))

    def atom(self, depth: int) -> Node:
        symbol = self.peek()
        if symbol is None or symbol in _NO_ATOMS:
            raise self.unexpected()
        self.position += 1
        if symbol == "(":
            node = self.sum(depth + 1)
            self.expect(")")
            return node
        if symbol[0].isdigit() or symbol[0] == ".":
            return self.number(symbol)
        if self.peek() != "(":
            return Name(symbol)
        return self.call(symbol, depth)

    def number(self, symbol: str) -> Constant:
        value = float(symbol)
        if not math.isfinite(value):
            raise UsageError(f"formula {excerpt(self.text)!r} has a number out of range", where=self.where)
        return Constant(value)

    def call(self, name: str, depth: int) -> Call:
        if name not in {"min", "max"}:
            raise UsageError(
                f"formula {excerpt(self.text)!r} calls {excerpt(name)!r}; only min and max can be called",
                where=self.where,
            )
        if depth + _CALL_DEPTH > _MAX_DEPTH:
            raise UsageError(f"formula {excerpt(self.text)!r} nests too many calls", where=self.where)
        self.expect("(")
        depth += _CALL_DEPTH
        arguments = [self.sum(depth)]
        while self.peek() == ",":
            self.position += 1
            arguments.append(self.sum(depth))
        self.expect(")")
        return Call("min" if name == "min" else "max", tuple(arguments))


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
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            # A quotient by infinity is the 0 that is wanted; a null stays null. Adding 0 makes -0.0 into 0.0.
            return left / (right + 0.0).replace(0.0, math.inf)
        case "**":
            # As for a quotient: a power of -0.0 would have the other sign of infinity.
            return (left + 0.0).pow(right)


def _extreme(function: Function, parts: list[pl.Expr]) -> pl.Expr:
    import polars as pl

    # The horizontal functions pass over nulls and NaN; a missing operand must not look like a small one.
    known = pl.all_horizontal(*(part.is_not_null() & part.is_not_nan() for part in parts))
    value = pl.min_horizontal(*parts) if function == "min" else pl.max_horizontal(*parts)
    return pl.when(known).then(value)


def evaluate(node: Node, values: Mapping[str, float | None]) -> float | None:
    """Compute a formula for one row, in plain Python; agrees with `to_polars`.

    Args:
        node: The formula.
        values: Every name it needs; None is null.

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
            given = values[name]
            return None if given is None else float(given)
        case Binary(operator, left, right):
            return _binary_value(operator, _value(left, values), _value(right, values))
        case Call(function, arguments):
            parts = [_value(argument, values) for argument in arguments]
            known = [part for part in parts if part is not None and not math.isnan(part)]
            if len(known) < len(parts):
                return None
            return min(known) if function == "min" else max(known)


def _binary_value(operator: Operator, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / (right or math.inf)
        case "**":
            return _power(left, right)


def _power(base: float, exponent: float) -> float:
    """Raise to a power; a result that is not real is NaN, one that is too large is infinite."""
    if base == 0 and exponent < 0:
        return math.inf
    if base < 0 and not exponent.is_integer():
        return math.nan
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf if base > 0 or exponent % 2 == 0 else -math.inf
