"""A vLLM scheduler that says what it does: a subclass of whichever scheduler the server would use.

It overrides six methods of an interface that vLLM does not call public. `missing` checks all that is used of it, before
the first request; a server that lacks some of it runs without tracing.
"""

from __future__ import annotations

import inspect
import secrets
import time
from typing import TYPE_CHECKING, Any

from tracefit_vllm import records
from tracefit_vllm.recorder import Recorder, logger
from tracefit_vllm.records import Header
from tracefit_vllm.settings import SettingError, Settings
from tracefit_vllm.spans import client_id, is_sampled

if TYPE_CHECKING:
    from collections.abc import Callable

OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "add_request": ("request",),
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_preempt_request": ("request", "timestamp"),
    "finish_requests": ("request_ids", "finished_status"),
    "get_request_counts": (),
    "shutdown": (),
}
"""Methods of vLLM's scheduler, and the arguments they must begin with: what 0.20 to 0.33 have."""

_STATUS = {
    "FINISHED_STOPPED": "stopped",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "aborted",
    "FINISHED_IGNORED": "ignored",
    "FINISHED_ERROR": "error",
    "FINISHED_REPETITION": "stopped",
    # FinishReason, which an output names.
    "STOP": "stopped",
    "LENGTH": "length",
    "ABORT": "aborted",
    "ERROR": "error",
    "REPETITION": "stopped",
}
_MOST_OPEN_STEPS = 64


def missing(base: type[Any]) -> str | None:
    """Return what a scheduler class lacks to be traced, if it lacks something."""
    for name, wanted in OVERRIDDEN.items():
        method = getattr(base, name, None)
        if not callable(method):
            return f"{base.__name__}.{name} is not there"
        has = tuple(inspect.signature(method).parameters)[1:]
        if has[: len(wanted)] != wanted:
            return f"{base.__name__}.{name} takes {', '.join(has)}"
    return None


class Tracing:
    """Hands a scheduler's records to its recorder. An error in it ends the tracing, and nothing else."""

    def __init__(self, scheduler: Any, recorder_of: Callable[[Header], Recorder] = Recorder) -> None:
        config = scheduler.vllm_config
        self._pool = scheduler.kv_cache_manager.block_pool
        shares = Settings.read()
        self._journey_rate = shares.journey_tracing_sample_rate
        parallel = config.parallel_config
        index = getattr(parallel, "data_parallel_index", 0)
        self._step = 0
        self._open: dict[int, int] = {}  # id of a step's output to the step
        self.recorder = recorder_of(
            Header(
                unix_offset_ns=time.time_ns() - time.monotonic_ns(),
                endpoint=config.observability_config.otlp_traces_endpoint,
                rank=index if index or parallel.data_parallel_size > 1 else None,
                block_size=scheduler.block_size,
                blocks=self._pool.num_gpu_blocks - 1,  # one stands for none
                journey_rate=shares.journey_tracing_sample_rate,
                step_rate=shares.step_tracing_sample_rate,
                snapshot_rate=shares.step_tracing_rich_subsample_rate,
                closure_interval=shares.step_tracing_closure_interval,
            )
        )

    def queued(self, request: Any) -> None:
        """Note a request that has come into the queue."""
        name, is_own = request.request_id, False
        headers = request.trace_headers
        traceparent = headers.get("traceparent") if headers else None
        if traceparent is None and is_sampled(client_id(name), self._journey_rate):
            # The server's own span of the request becomes the child of ours: both are known to be of one request.
            is_own, traceparent = True, f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
            request.trace_headers = {**(headers or {}), "traceparent": traceparent}
        at_ns, prompt, limit = time.monotonic_ns(), request.num_prompt_tokens, request.max_tokens
        self.recorder.put((records.QUEUED, at_ns, self._step, name, prompt, limit, traceparent, is_own))

    def begin(self) -> int:
        """Count a step; return when it began."""
        self._step += 1
        return time.monotonic_ns()

    def scheduled(self, scheduler: Any, output: Any, start_ns: int) -> None:
        """Note what a step was given."""
        end_ns = time.monotonic_ns()
        others, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
        if len(self._open) >= _MOST_OPEN_STEPS:
            self._open.clear()  # outputs that never came
        self._open[id(output)] = self._step
        running, waiting = scheduler.get_request_counts()
        new = [(r.req_id, r.num_computed_tokens, r.block_ids) for r in output.scheduled_new_reqs]
        record = (
            records.STEP,
            self._step,
            start_ns,
            end_ns,
            running,
            waiting,
            self._pool.get_num_free_blocks(),
            new,
            # Lists of this step alone, which nobody changes later.
            others.req_ids,
            others.num_computed_tokens,
            others.new_block_ids,
            tokens,
        )
        self.recorder.put(record, 1 + len(tokens))

    def preempted(self, name: str) -> None:
        """Note a request that lost its place."""
        self.recorder.put((records.PREEMPTED, time.monotonic_ns(), self._step, name))

    def output(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:
        """Note the tokens that a step gave, and the requests that end with it."""
        at_ns, step = time.monotonic_ns(), self._open.pop(id(scheduler_output), self._step)
        given: list[tuple[str, int]] = []
        ended: list[tuple[str, str]] = []
        for of_client in outputs.values():
            for one in of_client.outputs:
                given.append((one.request_id, len(one.new_token_ids)))
                if one.finish_reason is not None:
                    ended.append((one.request_id, _STATUS.get(one.finish_reason.name, "error")))
        if given:
            self.recorder.put((records.OUTPUT, at_ns, step, given, ended), 1 + len(given))

    def ended(self, names: list[str], status: str) -> None:
        """Note requests that somebody ended."""
        if names:
            self.recorder.put((records.ENDED, time.monotonic_ns(), self._step, names, status), len(names))


def traced(base: type[Any]) -> type[Any]:  # noqa: C901 - one short method for each that is overridden
    """Return a subclass of a scheduler class that is traced; the class itself if it cannot be."""
    if lacks := missing(base):
        logger.warning("tracefit-vllm: no tracing, this version of vLLM is not known: %s", lacks)
        return base

    class TracedScheduler(base):  # type: ignore[misc]  # whichever the server uses
        _tracing: Tracing | None = None

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            try:
                self._tracing = Tracing(self)
            except (SettingError, AttributeError, OSError) as error:
                logger.warning("tracefit-vllm: no tracing: %s", error)

        def _trace(self, note: str, *values: Any) -> Any:
            """Call a method of the tracing; whatever goes wrong in it ends the tracing alone."""
            try:
                return getattr(self._tracing, note)(*values)
            except Exception as error:  # noqa: BLE001 - the engine must not end with its tracing
                if (tracing := self._tracing) is not None:
                    self._tracing = None
                    tracing.recorder.end(f"{type(error).__name__}: {error}")
                return None

        def add_request(self, request: Any, *args: Any, **options: Any) -> Any:
            # A streaming session adds its later inputs under the same id.
            is_new = self._tracing is not None and request.request_id not in self.requests
            result = super().add_request(request, *args, **options)
            if is_new:
                self._trace("queued", request)
            return result

        def schedule(self, *args: Any, **options: Any) -> Any:
            if self._tracing is None:
                return super().schedule(*args, **options)
            start_ns = self._trace("begin")
            output = super().schedule(*args, **options)
            if self._tracing is not None:
                self._trace("scheduled", self, output, start_ns)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
            outputs = super().update_from_output(scheduler_output, *args, **options)
            if self._tracing is not None:
                self._trace("output", scheduler_output, outputs)
            return outputs

        def _preempt_request(self, request: Any, *args: Any, **options: Any) -> Any:
            result = super()._preempt_request(request, *args, **options)
            if self._tracing is not None:
                self._trace("preempted", request.request_id)
            return result

        def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **options: Any) -> Any:
            if self._tracing is None:
                return super().finish_requests(request_ids, finished_status, *args, **options)
            if request_ids is not None:
                request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            names = list(self.requests) if request_ids is None else request_ids
            open_ = [n for n in names if n in self.requests and not self.requests[n].is_finished()]
            result = super().finish_requests(request_ids, finished_status, *args, **options)
            self._trace("ended", open_, _STATUS.get(finished_status.name, "error"))
            return result

        def shutdown(self, *args: Any, **options: Any) -> Any:
            if (tracing := self._tracing) is not None:
                self._tracing = None
                tracing.recorder.close()
            return super().shutdown(*args, **options)

    TracedScheduler.__name__ = TracedScheduler.__qualname__ = f"Traced{base.__name__}"
    return TracedScheduler
