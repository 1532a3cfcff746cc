"""Run jobs on Ray, on a cluster or started here for one command. Ray is an extra: nothing else imports this module."""

from __future__ import annotations

import os
import socket
from contextlib import chdir
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from tracefit import memory
from tracefit._version import __version__
from tracefit.engines.cores import available_cores
from tracefit.engines.jobs import TASKS_PER_WORKER, WorkerError, attempt, call_here
from tracefit.errors import UsageError, names_flags
from tracefit.options import EngineChoice, WorkersOption, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tracefit.engines.jobs import Job

MEMORY_BYTES = 600 << 20
"""Memory of a job that Ray sets aside; a job that is run again gets twice as much, so that fewer run beside it."""

MOST_TRIES = 4
"""Attempts of a job whose worker or node dies. Ray itself would retry one that takes too much memory without end."""

_OBJECTS_BYTES = 512 << 20
_RAY_TURN_S, _ANSWER_S = 0.5, 5.0


class RayEngine:
    """A Ray cluster. Jobs carry the bytes of their blocks, unless all workers are on this machine and read the files.

    All nodes see the tables folder.
    """

    is_here = False

    def __init__(self, address: str | None, workers: int | None) -> None:
        """Connect to a cluster, or start Ray on this machine.

        Raises:
            UsageError: Ray is not installed, does not answer, or is of another version.
        """
        # Before the import, which reads them. Ray reports usage to its makers unless this forbids it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray  # noqa: PLC0415 - takes a second
        except ImportError as error:
            raise UsageError("Ray is not installed", hint="pip install 'tracefit[ray]'") from error
        self._ray = ray
        self._where = address or "Ray on this machine"
        self._is_own = not ray.is_initialized()
        self.carries_bytes = not (self._is_own and address is None)
        # A program that has started Ray keeps its own: a second start in one process is an error.
        if self._is_own:
            self._connect(address, workers or available_cores())
        self._nodes = [node for node in ray.nodes() if node["Alive"]]
        cores = int(ray.cluster_resources().get("CPU", 0))
        if not cores:
            self.__exit__()
            raise UsageError("has no CPU for jobs", where=self._where, hint="add nodes with CPUs")
        self.workers = min(workers or cores, cores)
        self._ahead = TASKS_PER_WORKER * cores if self.workers == cores else self.workers
        # A job that requests more than any node has would wait for ever.
        self._most = int(max(node["Resources"].get("memory", 0) for node in self._nodes))
        self._call = ray.remote(max_retries=0)(_work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_own:
            self._ray.shutdown()

    def _connect(self, address: str | None, workers: int) -> None:
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address is None:
            quiet |= {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _OBJECTS_BYTES}
        elif address != "auto":
            _require_answer(address)
        try:
            # Ray has workers import from the folder it is started in, which may hold any file.
            with chdir("/"):
                self._ray.init(address=address or "local", **quiet)
        except Exception as error:  # Ray's own, gRPC's or a builtin one: whatever it is, there is no cluster
            self._ray.shutdown()
            text = " ".join((str(error) or type(error).__name__).split())[:200]
            hint = (
                f"{named(EngineChoice, 'ray_address')} names a cluster of the same Ray and Python; "
                "RAY_AUTH_MODE=token if it wants one"
            )
            raise UsageError(f"cannot be used ({text})", where=self._where, hint=hint) from error

    def limit(self, workers: int) -> None:
        """Do nothing: the cluster's workers exist anyway."""

    def check(self, folder: Path | None) -> None:
        """Make sure that every node has this version of tracefit and sees a folder; see `jobs.TaskEngine`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On  # noqa: PLC0415

        # Ray starts a worker for a job that waits: of Ray on this machine, all start now.
        if not self.carries_bytes:
            for _ in range(self.workers):
                self._call.options(**_OPTIONS).remote(_version_at, folder, flags=names_flags())
        # On each node by name: where Ray itself would put the jobs, a node without tracefit could be missed.
        asked = {
            node["NodeManagerAddress"]: self._call.options(
                **_OPTIONS | {"num_cpus": 0}, scheduling_strategy=On(node["NodeID"], soft=False)
            ).remote(_version_at, folder, flags=names_flags())
            for node in self._nodes
        }
        hint = "install the same tracefit in the cluster's environment"
        for node, handle in asked.items():
            where = f"{self._where}, node {node}"
            try:
                (version, is_there), _ = self._ray.get(handle)
            except Exception as error:  # any error of importing tracefit there, as Ray wraps it
                raise UsageError("has no tracefit that can be imported", where=where, hint=hint) from error
            if version != __version__:
                raise UsageError(f"has tracefit {version}, this is {__version__}", where=where, hint=hint)
            if folder is not None and not is_there:
                shared = "write to a disk that all nodes share, or to a bucket"
                raise UsageError(f"does not see {folder.parent}", where=where, hint=shared)

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, Any]]:
        """Run jobs, and retry one whose worker or node died; see `jobs.TaskEngine`."""
        running: dict[Any, tuple[Job, int]] = {}
        while True:
            while len(running) < self._ahead and (job := next_job()) is not None:
                if job.is_shared:
                    yield job, call_here(self, job)
                else:
                    running[self._begin(job, 1)] = job, 1
            if not running:
                return
            done, _ = self._ray.wait(list(running), timeout=_RAY_TURN_S)
            for ref in done:
                job, tries = running.pop(ref)
                try:
                    value, error = self._ray.get(ref)
                except self._ray.exceptions.RayError as died:
                    if tries < MOST_TRIES:
                        running[self._begin(job, tries + 1)] = job, tries + 1
                        continue
                    text = f"a worker died while it was read, {tries} times ({type(died).__name__})"
                    hint = f"if memory ran out, use fewer {named(WorkersOption)}, or nodes with more memory"
                    raise WorkerError(text, where=job.name, hint=hint) from died
                if error is not None:
                    raise error
                yield job, value
            job = ref = value = None  # a named object is not freed

    def _begin(self, job: Job, tries: int) -> Any:
        reserved = min(MEMORY_BYTES << (tries - 1), self._most)
        call = self._call.options(memory=reserved, **_OPTIONS)
        return call.remote(job.function, job.argument, flags=names_flags())


_OPTIONS: dict[str, Any] = {
    "num_cpus": 1,
    "runtime_env": {"env_vars": {**memory.ALLOCATOR_SETTINGS, memory.POLARS_THREADS: "1", "PYTHONSAFEPATH": "1"}},
}
"""Options of jobs: a core each, and nothing from the working folder."""


def _work(
    function: Callable[[Any], Any], argument: Any, *, flags: bool | Mapping[str, str]
) -> tuple[Any, Exception | None]:
    """Do a job, in a worker that is set up as those of the local engine."""
    _set_up()
    return attempt(function, argument, flags=flags)


@cache  # once in a worker, which is given one job after the other
def _set_up() -> None:
    memory.reuse_freed()


def _version_at(folder: Path | None) -> tuple[str, bool]:
    return __version__, folder is None or folder.is_dir()


def _require_answer(address: str) -> None:
    """Refuse an address without a listener: Ray itself would retry for a minute with many messages."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            pass
    except (OSError, ValueError, OverflowError) as error:
        hint = f"{named(EngineChoice, 'ray_address')} is auto, ray://HOST:PORT or HOST:PORT"
        raise UsageError(f"does not answer ({error})", where=address, hint=hint) from error
