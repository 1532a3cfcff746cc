"""Receive traces from running servers: listen, write run folders, end in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from tracefit.coefficients.models import Models, load
from tracefit.commands.ingest import stated_settings
from tracefit.errors import UsageError
from tracefit.inputs.buckets import location_of
from tracefit.inputs.folders import MODEL_CONFIG_NAME, RUN_CONFIG_NAMES
from tracefit.models.predict import published_mdape_pct
from tracefit.options import DeploymentOption, ServerOptions
from tracefit.progress import NullProgress, Progress
from tracefit.receive.connections import keep_few, want_descriptors
from tracefit.receive.intake import Intake
from tracefit.receive.observed import Observed, ObservedStep, StepErrors, show_live
from tracefit.receive.options import LiveOption, ReceiveOptions, ReceiveOutOption, Token, WatchedModelsOption
from tracefit.receive.runs import OtherRun, RunFolders
from tracefit.receive.spans import PrivacyFilter
from tracefit.receive.store import TraceStore, require_writable
from tracefit.results.traces import ReceivedFrom, ReceiveResult, RecordedFrom
from tracefit.server.context import read_context
from tracefit.server.documents import excerpt
from tracefit.server.settings import merge, parse_settings, read_all_settings
from tracefit.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tracefit.receive.forward_pass_metrics import StepRecorder
    from tracefit.receive.grpc_server import GrpcServer
    from tracefit.receive.http_server import HttpServer

_CHECK_RUNS_S = 0.5
_TO_FILL_IN = ("model", "gpu", "tensor_parallel", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
_CONFIG_HEAD = """\
# What tracefit has to know of the server behind these traces: fill in what is missing.
# Every setting of `vllm serve` may stand here, under its own name.
"""
_STATED_OPTIONS = "# tracefit receive was started with: "
"""Before the names of the settings that the user stated then, and did not fill in later."""


class Listening(msgspec.Struct, frozen=True):
    """Where the receiver listens, and the folder it writes to."""

    host: str
    grpc_port: int
    http_port: int
    out: Path


def receive(
    out: ReceiveOutOption,
    *,
    server: ServerOptions | None = None,
    options: ReceiveOptions | None = None,
    live: LiveOption = False,
    models: Models | WatchedModelsOption = None,
    deployment: DeploymentOption = None,
    listening: Callable[[Listening], None] | None = None,
    progress: Progress | None = None,
) -> ReceiveResult:
    """Listen for OTLP traces and write them to run folders below `out`, until SIGTERM, SIGINT or `stop_after_s`.

    A request is acknowledged when its spans are on disk, so that nothing acknowledged is lost, even if the process is
    killed.

    Args:
        out: Folder of run folders; one is made for each `service.name` that sends.
        server: Facts about the servers; they go into each run's exp-config.yaml and config.json.
        options: Where to listen, which senders are allowed, and which spans are kept.
        live: Show incoming spans on the terminal.
        models: Coefficient files of the servers: how far off their step times are is shown on the terminal and in the
            metrics.
        deployment: See `Models.deployment`.
        listening: Called once both ports are open.
        progress: Receives warnings about missing parts of the traces.

    Raises:
        UsageError: A port is taken, the folder cannot be written, or an option or a file is wrong.
    """
    options = options or ReceiveOptions()
    options.require_safe()
    step_model = None if models is None else _StepModel(models, deployment)
    token = Token(options.token_file)
    server = server or ServerOptions()
    _configs(server)  # refused before anything is made
    root = location_of(out)
    try:
        root.mkdir(parents=True, exist_ok=True)
        require_writable(root)
        runs = run_folders(root.resolve(), server)
        store = TraceStore(root.resolve(), rotation=options.rotation, runs=runs)
        others = list(runs.others())
    except OSError as error:
        raise UsageError(f"cannot be written ({error.strerror})", where=str(out)) from error
    receiver = _Receiver(store, options, token, step_model, progress or NullProgress())
    receiver.warn_of_other_runs(others)
    asyncio.run(receiver.run(live=live, listening=listening or (lambda _: None)))
    return receiver.result(root)


def run_folders(root: Path, server: ServerOptions) -> RunFolders:
    """Return the run folders below a folder for what is stated of the servers.

    Raises:
        UsageError: A setting or a file is wrong.
    """
    configs = _configs(server)
    return RunFolders(root, configs, partial(_difference, configs))


def _configs(server: ServerOptions) -> dict[str, bytes]:
    """Return the configuration files of a run: the known facts, and lines to fill in."""
    # As `run` will read it: better refused now than when the traces are there.
    run_configs = [server.run_config] if server.run_config else []
    stated = stated_settings(server)
    read_context(run_configs, server.model_config, stated, gpu=server.gpu)
    given = merge(read_all_settings(run_configs), stated)
    known = {**given.values(), **given.other}
    if server.gpu is not None:
        known["gpu"] = str(Path(server.gpu).resolve()) if server.gpu.endswith(".json") else server.gpu
    text = yaml.safe_dump(known, sort_keys=False) if known else ""
    stated_names = f"{_STATED_OPTIONS}{json.dumps(list(known))}\n" if known else ""
    blanks = "".join(f"# {name}:\n" for name in _TO_FILL_IN if name not in known)
    configs = {"exp-config.yaml": f"{_CONFIG_HEAD}{stated_names}{text}{blanks}".encode()}
    if server.model_config is not None:
        # Copied: the run folder then says all that is known of the server, wherever it is moved.
        configs["config.json"] = server.model_config.read_bytes()
    return configs


def _difference(configs: Mapping[str, bytes], run: Path) -> str:
    """Return how the configuration in a run folder differs from what this start of the receiver states.

    Settings that a user has filled in there do not count. Those of an earlier start count if this one does not state
    them, unless it states nothing at all.
    """
    ours = _settings_in(configs["exp-config.yaml"], "exp-config.yaml")
    paths = [path for name in RUN_CONFIG_NAMES if (path := run / name).is_file()]
    model_config = run / MODEL_CONFIG_NAME
    has_both = MODEL_CONFIG_NAME in configs and model_config.is_file()
    if has_both and model_config.read_bytes() != configs[MODEL_CONFIG_NAME]:
        return f"another {MODEL_CONFIG_NAME}"
    if not ours or not paths:
        return ""
    theirs: dict[str, object] = {}
    stated: set[str] = set()
    for path in paths:
        try:
            content = path.read_bytes()
            theirs |= _settings_in(content, str(path))
        except (OSError, UsageError):
            return f"its {path.name} cannot be read"
        stated |= _stated_names(content)
    for name in [*ours, *sorted(stated - ours.keys())]:
        there, now = ({name: settings[name]} if name in settings else {} for settings in (theirs, ours))
        if there != now:
            return f"{name}: {_shown(there)} there, {_shown(now)} now"
    return ""


def _stated_names(content: bytes) -> set[str]:
    """Return the settings that an earlier start of the receiver stated; none if the file is not of a receiver."""
    for line in content.decode(errors="replace").splitlines():
        if line.startswith(_STATED_OPTIONS):
            with contextlib.suppress(ValueError, TypeError):
                return set(map(str, json.loads(line.removeprefix(_STATED_OPTIONS))))
    return set()


def _settings_in(content: bytes, where: str) -> dict[str, object]:
    settings = parse_settings(content, where=where)
    return {**settings.values(), **settings.other}


def _shown(setting: Mapping[str, object]) -> str:
    return "".join(map(excerpt, setting.values())) or "not stated"


class _StepModel:
    """Predicts the steps that come in, with the model of one deployment."""

    def __init__(self, models: Models | str | Path, deployment: str | None) -> None:
        chosen = (models if isinstance(models, Models) else load(models)).deployment(deployment)
        published = published_mdape_pct(chosen.step_model)
        self.errors = StepErrors(None if published is None else published / 100)
        self._models = chosen
        # A model that summaries do not suffice for is refused now, not when steps come in.
        self._predicted_us([ObservedStep(0, 1, 0, 0, 1, 1.0)])

    def compare(self, steps: Sequence[ObservedStep]) -> None:
        """Predict steps and count how far off the predictions are."""
        self.errors.add(steps, self._predicted_us(steps))

    def _predicted_us(self, steps: Sequence[ObservedStep]) -> list[float | None]:
        import polars as pl  # noqa: PLC0415 - takes long to load, and a receiver without models needs none

        from tracefit.models.frames import predict_steps  # noqa: PLC0415

        block_tokens = self._models.server["block_size"]
        # A summary has no context: it follows from the KV blocks in use, as these follow from it in
        # `describe.STEP_COLUMNS`.
        requests = pl.col("num_decode_reqs") + pl.col("num_prefill_reqs")
        cached = (pl.col("kv_blocks_used") - requests / 2) * block_tokens - pl.col("prefill_tokens")
        schema = dict.fromkeys(ObservedStep._fields, pl.Float64)
        rows = pl.DataFrame(steps, schema, orient="row", strict=False).select(
            batch="num_decode_reqs",
            context=cached.clip(0) / pl.max_horizontal("num_decode_reqs", 1),
            prefill="prefill_tokens",
            prefill_reqs="num_prefill_reqs",
            waiting="waiting_depth",
        )
        return predict_steps(self._models, rows)["predicted_us"].to_list()


class _Receiver:
    """Both ports, the disk, and the reports about them."""

    def __init__(
        self,
        store: TraceStore,
        options: ReceiveOptions,
        token: Token,
        step_model: _StepModel | None,
        progress: Progress,
    ) -> None:
        self._store = store
        self._options = options
        self._progress = progress
        self._token = token
        self._step_model = step_model
        self._observed = Observed(step_errors=step_model.errors if step_model else None)
        privacy = PrivacyFilter(options.keep_attributes, all_spans=options.all_spans)
        limits = options.limits.within(want_descriptors())
        self._intake = Intake(store, privacy, self._observed, limits)
        self._warnings: list[str] = []
        self._recorder: StepRecorder | None = None

    def warn_of_other_runs(self, others: Sequence[OtherRun]) -> None:
        """Say in one line that services have runs with other settings, and where their spans go now."""
        if others:
            of_first = f"{others[0].folder.name}/ has other settings ({others[0].difference})"
            used = f"what its service sends goes to {others[0].used.name}/, a run of its own"
            more = f"; so it is with {plural(len(others) - 1, 'other run')}" if others[1:] else ""
            self._warnings.append(f"{of_first}: {used}{more}")
            self._progress.warn(self._warnings[-1])

    def _closed_silent(self, connections: int) -> None:
        for _ in range(connections):
            text = "more connections than an address or a port may have; those silent longest are closed"
            self._observed.refusals.add("connections", text, "an address with many of them")

    async def run(self, *, live: bool, listening: Callable[[Listening], None]) -> None:
        """Receive until a stop is requested, then finish open requests."""
        servers = _servers(self._intake, self._token, has_metrics=self._options.metrics)
        stop = asyncio.Event()
        if endpoints := self._options.forward_pass_metrics:
            self._recorder = _recorder(endpoints, self._intake)
        with _signals(stop):
            try:
                grpc_port, http_port = [await each.start(self._options) for each in servers]
            except UsageError:
                await asyncio.gather(*(each.stop() for each in servers))
                raise
            writing = asyncio.create_task(self._intake.run())
            if self._recorder is not None:
                self._recorder.start()
            ports = (grpc_port, http_port)
            watching = [
                asyncio.create_task(self._watch()),
                asyncio.create_task(keep_few(ports, self._intake.limits, self._closed_silent)),
            ]
            if live:
                watching.append(asyncio.create_task(show_live(self._observed)))
            listening(Listening(self._options.host, grpc_port, http_port, self._store.root))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait(
                {stopping, writing}, timeout=self._options.stop_after_s, return_when=asyncio.FIRST_COMPLETED
            )
            # Servers first, then the disk: open requests are still acknowledged.
            await asyncio.gather(*(each.stop() for each in servers))
            if self._recorder is not None:
                await self._recorder.stop()
            self._intake.close()
            await writing
            for task in (stopping, *watching):
                task.cancel()
            await asyncio.gather(stopping, *watching, return_exceptions=True)
        self._warn()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_RUNS_S)
            self._warn()
            if self._step_model is not None and (steps := self._observed.take_steps()):
                await asyncio.to_thread(self._step_model.compare, steps)

    def _warn(self) -> None:
        for text in self._observed.new_warnings():
            self._warnings.append(text)
            self._progress.warn(text)
        # A receiver that runs for months has many of these: the result has only their counts.
        recorded = self._recorder.news() if self._recorder is not None else []
        for text in (*self._observed.refusals.news(), *recorded):
            self._progress.warn(text)

    def result(self, out: Path) -> ReceiveResult:
        """Return the totals received, the most active senders first."""
        senders = self._intake.senders
        return ReceiveResult(
            out=out,
            files=tuple(self._store.files),
            file_count=self._store.file_count,
            bytes=self._store.written_bytes,
            spans=self._observed.spans,
            exports=self._observed.exports,
            refused=self._observed.refusals.total,
            refused_by_cause=dict(self._observed.refusals.counts.items()),
            dropped_events=self._observed.dropped_events,
            received_from=tuple(ReceivedFrom(s.service, s.instance, spans) for s, spans in senders.spans.most_common()),
            forgotten_senders=senders.forgotten,
            forgotten_spans=senders.forgotten_spans,
            warnings=tuple(self._warnings),
            recorded_from=tuple(
                RecordedFrom(s.endpoint, s.records, s.lost_messages, s.refused.total(), dict(s.refused.items()))
                for s in (self._recorder.publishers if self._recorder is not None else ())
            ),
        )


def _servers(intake: Intake, token: Token, *, has_metrics: bool) -> tuple[GrpcServer, HttpServer]:
    # grpcio reads it when it is imported. Errors of clients do not belong on the receiver's terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        if has_metrics:
            import prometheus_client  # noqa: F401, PLC0415 - better missing now than at the first scrape
        from tracefit.receive.grpc_server import GrpcServer  # noqa: PLC0415 - only the extra has its packages
        from tracefit.receive.http_server import HttpServer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UsageError(
            f"receiving needs the Python package {error.name}", hint="pip install 'tracefit[receive]'"
        ) from error
    return GrpcServer(intake, token), HttpServer(intake, token, has_metrics=has_metrics)


def _recorder(endpoints: Sequence[str], intake: Intake) -> StepRecorder:
    # Polars takes long to load, and a receiver that gets only spans does not need it.
    from tracefit.recordings.fpm import as_line  # noqa: PLC0415

    try:
        from tracefit.receive.forward_pass_metrics import StepRecorder  # noqa: PLC0415 - only the extra has its packages
    except ModuleNotFoundError as error:
        raise UsageError(
            f"receiving needs the Python package {error.name}", hint="pip install 'tracefit[receive]'"
        ) from error
    return StepRecorder(endpoints, as_line, intake)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Stop in order on SIGTERM and SIGINT; a thread that is not the main one gets no signals."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    for number in caught if is_main else ():
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in caught if is_main else ():
            loop.remove_signal_handler(number)
