"""Tests whose runs are ingested together: twelve small runs in one call take as long as two in calls of their own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    import polars as pl

    from tracefit.tables.store import TableStore

    # A test that yields what its run folder holds, an object with `write(folder)`, and is given the tables.
    Composed = Generator[Any, "Tables", None]


@dataclass(frozen=True)
class Tables:
    """The tables of one run, by their names."""

    store: TableStore
    run_id: str

    def __call__(self, name: str) -> pl.DataFrame:
        return self.store.read(name, [self.run_id])

    __getitem__ = __call__


@dataclass(frozen=True)
class Recorded:
    """A run folder with settings and files of these contents."""

    settings: str
    contents: tuple[bytes, ...]
    name: str = "recorded-{}"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text(self.settings)
        for number, content in enumerate(self.contents):
            (folder / self.name.format(number)).write_bytes(content)


def together(test: Callable[..., Composed]) -> Callable[..., None]:
    """Make a test of a generator that yields its run once; all such runs of a session are ingested in one call.

    Its parameters are `traces`, an empty trace, `new_traces`, a function that returns one, and those of its cases.
    """

    def run(ingested_together: Callable[[Any], tuple[Composed, Tables]], request: Any, **_: Any) -> None:
        composed, tables = ingested_together(request.node)
        try:
            composed.send(tables)
        except StopIteration:
            return
        raise AssertionError("it yields two runs")

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    run.composed = test  # type: ignore[attr-defined]
    own = inspect.signature(run).parameters
    cases = [p for p in inspect.signature(test).parameters.values() if p.name not in ("traces", "new_traces")]
    fixtures = [p for p in own.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    run.__signature__ = inspect.Signature([*fixtures, *cases])  # type: ignore[attr-defined]
    return run


def composed_by(item: Any, new_traces: Callable[[], Any]) -> Callable[[], Composed] | None:
    """Return what starts the generator of a test, if it is such a test."""
    test = getattr(getattr(item, "function", None), "composed", None)
    if test is None:
        return None
    known = {"traces": new_traces(), "new_traces": new_traces}
    cases = item.callspec.params if hasattr(item, "callspec") else {}
    wanted = inspect.signature(test).parameters
    return partial(test, **{name: value for name, value in (known | cases).items() if name in wanted})
