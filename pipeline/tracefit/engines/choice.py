"""The choice of an engine: the option of a user, and the engine it stands for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tracefit.engines.local import LocalEngine
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.engines.jobs import TaskEngine


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Where the work of a command runs.

    Attributes:
        name: `local` for processes of this machine, `ray` for Ray.
        ray_address: The Ray cluster: `auto` for the one that this machine belongs to, `ray://HOST:PORT` or HOST:PORT for
            another. Not given, Ray is started on this machine for the command.
    """

    name: Literal["local", "ray"] = "local"
    ray_address: str | None = None


LOCAL = EngineChoice()


@contextmanager
def open_engine(choice: EngineChoice, workers: int | None) -> Iterator[TaskEngine]:
    """Open an engine.

    Args:
        choice: Which one.
        workers: Most jobs at the same time; as many as there are cores if not given.

    Raises:
        UsageError: Ray is not installed, does not answer, or is of another version.
    """
    if choice.name == "ray":
        from tracefit.engines.ray import RayEngine  # noqa: PLC0415 - an extra

        with RayEngine(choice.ray_address, workers) as engine:
            yield engine
        return
    if choice.ray_address is not None:
        raise UsageError(
            "--ray-address goes with --engine ray", hint="add --engine ray, or leave the address out"
        )
    with LocalEngine(workers) as local:
        yield local
