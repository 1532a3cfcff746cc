"""A vLLM scheduler that says what it does: a subclass of whichever scheduler the server would use.

It overrides six methods of an interface that vLLM does not call public. `missing` checks all that is used of it, before
the first request; a server that lacks some of it runs without tracing.
"""

from __future__ import annotations

import inspect
import os
import re
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
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


def refuse(why: str, *, what: str = "version of vLLM") -> None:
    """Say that a server is not traced."""
    logger.warning("tracefit-vllm: no tracing, this %s is not known: %s", what, why)


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
                process_id=os.getpid(),
                unix_offset_ns=time.time_ns() - time.monotonic_ns(),
                endpoint=config.observability_config.otlp_traces_endpoint,
                rank=index if index or parallel.data_parallel_size > 1 else None,
                block_size=scheduler.block_size,
                blocks=self._pool.num_gpu_blocks - 1,  # one stands for none
                step_rate=shares.step_tracing_sample_rate,
                snapshot_rate=shares.step_tracing_rich_subsample_rate,
                closure_interval=shares.step_tracing_closure_interval,
            )
        )

    @staticmethod
    def is_new(scheduler: Any, request: Any) -> bool:
        """Return whether a request is one to follow.

        A streaming session adds its later inputs under the same id, and its prompt grows: its steps are left out.
        """
        return not request.resumable and request.request_id not in scheduler.requests

    def queued(self, request: Any) -> None:
        """Note a request that has come into the queue."""
        name, headers = request.request_id, request.trace_headers or {}
        caller = _TRACEPARENT.match(headers.get("traceparent", ""))
        own = None
        # A caller who traces a share of its requests decides for them.
        if is_sampled(client_id(name), self._journey_rate) and (caller is None or int(caller[3], 16) & 1):
            # The server's own span of the request becomes the child of ours: both are known to be of one request.
            own = (caller[1] if caller else secrets.token_hex(16), secrets.token_hex(8))
            request.trace_headers = {**headers, "traceparent": f"00-{own[0]}-{own[1]}-01"}
        at_ns, prompt, limit = time.monotonic_ns(), request.num_prompt_tokens, request.max_tokens
        of_caller = (caller[1], caller[2]) if caller else None
        self.recorder.put((records.QUEUED, at_ns, self._step, name, prompt, limit, of_caller, own))

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
            # Lists that belong only to this step, and that nobody changes later.
            others.req_ids,
            others.num_computed_tokens,
            others.new_block_ids,
            tokens,
            list(output.scheduled_spec_decode_tokens),
        )
        self.recorder.put(record, 1 + len(tokens))

    def preempted(self, request: Any) -> None:
        """Note a request that lost its place."""
        self.recorder.put((records.PREEMPTED, time.monotonic_ns(), self._step, request.request_id))

    @staticmethod
    def wrong_drafts(scheduler_output: Any, model_output: Any) -> list[tuple[str, int]]:
        """Return how many drafts of each request with some were wrong; before the update, which cuts what passes a
        limit.
        """
        wrong = []
        if drafts := scheduler_output.scheduled_spec_decode_tokens:
            index, sampled = model_output.req_id_to_index, model_output.sampled_token_ids
            for name, tokens in drafts.items():
                given = len(sampled[index[name]])
                wrong.append((name, len(tokens) + 1 - given if given else 0))
        return wrong

    def output(self, scheduler_output: Any, outputs: dict[int, Any], wrong: list[tuple[str, int]]) -> None:
        """Note the tokens that a step gave, and the requests that end with it."""
        at_ns, step = time.monotonic_ns(), self._open.pop(id(scheduler_output), self._step)
        given: list[tuple[str, int]] = []
        ended: list[tuple[str, str]] = []
        for of_client in outputs.values():
            for one in of_client.outputs:
                given.append((one.request_id, len(one.new_token_ids)))
                if one.finish_reason is not None:
                    ended.append((one.request_id, _STATUS.get(one.finish_reason.name, "error")))
        if given or wrong:
            self.recorder.put((records.OUTPUT, at_ns, step, given, ended, wrong), 1 + len(given))

    @staticmethod
    def open_of(scheduler: Any, names: str | list[str] | None) -> list[str]:
        """Return the requests that are not finished, of some or of all."""
        of_all = scheduler.requests
        wanted = of_all if names is None else [names] if isinstance(names, str) else names
        return [name for name in wanted if name in of_all and not of_all[name].is_finished()]

    def ended(self, names: list[str] | None, status: Any) -> None:
        """Note requests that somebody ended."""
        if names:
            of_us = _STATUS.get(status.name, "error")
            self.recorder.put((records.ENDED, time.monotonic_ns(), self._step, names, of_us), len(names))

    def close(self) -> None:
        """Send what is queued."""
        self.recorder.close()


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, SettingError) else f"{type(error).__name__}: {error}"


def traced(base: type[Any]) -> type[Any]:  # noqa: C901 - one short method for each that is overridden
    """Return a subclass of a scheduler class that is traced; the class itself if it cannot be."""
    if lacks := missing(base):
        refuse(lacks, what="version of vLLM" if base.__module__.startswith("vllm.") else "--scheduler-cls")
        return base

    class TracedScheduler(base):  # type: ignore[misc]  # the server chooses the base class at run time
        _tracing: Tracing | None = None

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            try:
                self._tracing = Tracing(self)
            except Exception as error:  # noqa: BLE001 - a changed scheduler must not stop the server
                logger.warning("tracefit-vllm: no tracing: %s", _said(error))

        def _trace(self, note: str, *values: Any) -> Any:
            """Call a method of the tracing; an error in it ends only the tracing."""
            if (tracing := self._tracing) is None:
                return None
            try:
                return getattr(tracing, note)(*values)
            except Exception as error:  # noqa: BLE001 - the engine must not end with its tracing
                self._tracing = None
                tracing.recorder.end(_said(error))
                return None

        def add_request(self, request: Any, *args: Any, **options: Any) -> Any:
            is_new = self._trace("is_new", self, request)
            result = super().add_request(request, *args, **options)
            if is_new:
                self._trace("queued", request)
            return result

        def schedule(self, *args: Any, **options: Any) -> Any:
            start_ns = self._trace("begin")
            output = super().schedule(*args, **options)
            self._trace("scheduled", self, output, start_ns)
            return output

        def update_from_output(
            self, scheduler_output: Any, model_runner_output: Any, *args: Any, **options: Any
        ) -> Any:
            wrong = self._trace("wrong_drafts", scheduler_output, model_runner_output)
            outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **options)
            self._trace("output", scheduler_output, outputs, wrong)
            return outputs

        def _preempt_request(self, request: Any, *args: Any, **options: Any) -> Any:
            result = super()._preempt_request(request, *args, **options)
            self._trace("preempted", request)
            return result

        def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **options: Any) -> Any:
            if request_ids is not None and not isinstance(request_ids, str):
                request_ids = list(request_ids)  # it may be an iterator, which can be read only once
            open_ = self._trace("open_of", self, request_ids)
            result = super().finish_requests(request_ids, finished_status, *args, **options)
            self._trace("ended", open_, finished_status)
            return result

        def shutdown(self, *args: Any, **options: Any) -> Any:
            self._trace("close")
            self._tracing = None
            return super().shutdown(*args, **options)

    TracedScheduler.__name__ = TracedScheduler.__qualname__ = f"Traced{base.__name__}"
    return TracedScheduler
