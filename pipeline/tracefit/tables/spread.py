"""How one build gives its calls to several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Spread(Protocol):
    """Calls a function for each of some items, as `map` does; where it runs them is its own choice."""

    def __call__(self, function: Callable[[_Item], _Result], items: Iterable[_Item], /) -> Iterator[_Result]:
        """Yield the results in the order of the items; both can be pickled.

        An item may be null if the next one has to wait for a result that is not yielded yet.
        """
