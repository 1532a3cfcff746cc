"""From a request to its acknowledgement, for both protocols: admission, decoding, and one disk write for many requests.

A request waits for one of a few reader slots before any of it is read. So memory is bounded by the requests
in these slots and those that wait for their turn or for the disk. Decoding takes turns of some milliseconds,
so that no request holds up the others. While one group of requests is written and synced, the next one
gathers: a lone sender waits for one sync, sixty-four of them share it.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

from tracefit.errors import DataError
from tracefit.receive.senders import Senders
from tracefit.receive.spans import RequestError, gunzip, protobuf_of_json, stated_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tracefit.receive.observed import Observed
    from tracefit.receive.options import IntakeLimits
    from tracefit.receive.refusals import Cause
    from tracefit.receive.spans import InSlices, PrivacyFilter, Sender, SenderSpans
    from tracefit.receive.store import TraceStore

_T = TypeVar("_T")
BodyEncoding = Literal["protobuf", "json"]

ONLY_TRACES = "tracefit receives only traces; set OTEL_METRICS_EXPORTER=none and OTEL_LOGS_EXPORTER=none"
TOKEN_NEEDED = "a token is needed, as `authorization: Bearer …`"  # noqa: S105 - a message

_GZIP_MAGIC = b"\x1f\x8b"
_SHORT_BYTES: dict[BodyEncoding, int] = {"protobuf": 1 << 20, "json": 128 << 10}
"""Decompressed length up to which requests are decoded at the same time as others; a batch of the SDK has
half as much."""


class BusyError(DataError):
    """A request that can be sent again, after `retry_s` seconds."""

    def __init__(self, what: str, cause: Cause = "busy") -> None:
        super().__init__(what)
        self.cause = cause
        # A reader slot is free again in a moment; a disk that is full or slow takes longer, and so does a fleet.
        self.retry_s = 5 if cause in ("disk", "senders") else 1


class _Pending(NamedTuple):
    """Spans that wait for the disk, and the future of the request they came in."""

    received: list[SenderSpans]
    size_bytes: int
    done: asyncio.Future[None]


class _Slots:
    """Slots for readers, one per request; a limited number of requests waits for one, for a limited time."""

    def __init__(self, slots: int, limits: IntakeLimits) -> None:
        self._free = asyncio.Semaphore(slots)
        self._limits = limits
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Occupy one of the slots.

        Raises:
            BusyError: Too many wait, or no slot is free in time.
        """
        if self._waiting >= self._limits.queued_requests:
            raise BusyError("too many requests at once")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await self._free.acquire()
        except TimeoutError:
            raise BusyError("too many requests at once") from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()


class Intake:
    """Takes requests in. `run` must be going on for any of them to be acknowledged."""

    def __init__(
        self,
        store: TraceStore,
        privacy: PrivacyFilter,
        observed: Observed,
        limits: IntakeLimits,
        senders: Senders | None = None,
    ) -> None:
        self.observed = observed
        self.limits = limits
        self.senders = Senders(limits) if senders is None else senders
        self.open_requests = 0
        self._store = store
        self._privacy = privacy
        self._slots = _Slots(limits.readers, limits)
        self._long = _Slots(1, limits)
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._is_closing = False
        self._disk_works = True

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: the disk has taken something since it last failed, or it failed a while ago.

        So a receiver that senders avoid because it was not ready becomes ready again.
        """
        return not self._is_closing and (self._disk_works or not self.observed.refusals.is_lasting("disk"))

    @property
    def written_bytes(self) -> int:
        """Bytes of trace files on disk."""
        return self._store.written_bytes

    async def free_bytes(self) -> int | None:
        """Return the free bytes of the disk, which may take long to answer."""
        return await asyncio.to_thread(self._store.free_bytes)

    async def take(
        self,
        read: Callable[[], Awaitable[bytes]],
        encoding: BodyEncoding = "protobuf",
        *,
        is_gzip: bool | None = None,
    ) -> None:
        """Read a request and return once its spans are on disk.

        Args:
            read: Reads the body, of at most `limits.message_bytes`.
            encoding: Encoding of the body.
            is_gzip: Whether it is compressed; detected from its first bytes if None.

        Raises:
            RequestError: The body is not a request of traces; sending it again would not help.
            BusyError: There is no room for the request now.
        """
        self.open_requests += 1
        refusal: DataError | None = None
        try:
            received = await self._received(read, encoding, is_gzip=is_gzip)
            await self.write(received)
        except TimeoutError:
            refusal = BusyError(f"not delivered within {self.limits.read_s:g} s")
        except DataError as error:
            refusal = error
        finally:
            self.open_requests -= 1
        if refusal is not None:
            # Its traceback would keep the request in memory for as long as the sender takes to read the answer.
            refusal.__context__ = None
            raise refusal.with_traceback(None)
        for sender, _, count in received:
            self.senders.count(sender, count)
            self.observed.spans += count
            self.observed.unnamed |= sender.is_unnamed
        self.observed.exports += 1

    async def _received(
        self, read: Callable[[], Awaitable[bytes]], encoding: BodyEncoding, *, is_gzip: bool | None
    ) -> list[SenderSpans]:
        """Read a request and decode it: a short one in turns with all others, long ones one after another."""
        async with self._slots.one():
            # Before anything is read, and after earlier requests: a refused request has cost no memory.
            if self._pending_bytes > self.limits.pending_bytes:
                raise BusyError("the disk does not keep up", "disk")
            async with asyncio.timeout(self.limits.read_s):
                body = await read()
            # No protobuf message begins like gzip: its first byte would be a field of a wire type that does not exist.
            is_gzip = body.startswith(_GZIP_MAGIC) if is_gzip is None else is_gzip
            size_bytes = stated_bytes(body) if is_gzip else len(body)
            if size_bytes <= _SHORT_BYTES[encoding]:
                return await _in_turns(self._decode(body, encoding, is_gzip=is_gzip))
        # A long one waits undecoded, without a slot; only a few may wait.
        if self._pending_bytes > self.limits.pending_bytes // 4:
            raise BusyError("too many long requests at once")
        waiting_bytes = len(body)
        work = self._decode(body, encoding, is_gzip=is_gzip)
        del body
        self._pending_bytes += waiting_bytes
        try:
            async with self._long.one():
                return await _in_turns(work)
        finally:
            self._pending_bytes -= waiting_bytes

    def _decode(self, body: bytes, encoding: BodyEncoding, *, is_gzip: bool) -> InSlices[list[SenderSpans]]:
        if is_gzip:
            body = yield from gunzip(body, limit_bytes=self.limits.message_bytes)
        if encoding == "json":
            body = yield from protobuf_of_json(body)
        received = yield from self._privacy.by_sender(body, self.observed)
        # A sender that makes up an instance per request must not fill the disk with folders.
        most = self.limits.senders
        if len(received) > most:
            raise RequestError(f"more than {most:,} different service.instance.ids")
        if not self.senders.admit([spans.sender for spans in received]):
            raise BusyError(f"{most:,} servers are active, and no more may be", "senders")
        return received

    async def write(self, received: list[SenderSpans]) -> None:
        """Return once all of the spans are on disk.

        Raises:
            BusyError: It cannot be written now.
        """
        if not received:
            return
        size = sum(len(spans.payload) for spans in received)
        done = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(received, size, done))
        self._pending_bytes += size
        self._wake.set()
        await done

    async def run(self) -> None:
        """Write pending spans, group by group, until `close` is called and everything is written."""
        loop = asyncio.get_running_loop()
        # fsync blocks, which the event loop must not; one thread keeps the order of records in a file.
        with ThreadPoolExecutor(1, thread_name_prefix="disk") as disk:
            while not (self._is_closing and not self._pending):
                await self._wake.wait()
                self._wake.clear()
                await self._write(disk)
            await loop.run_in_executor(disk, self._store.close)

    async def _write(self, disk: ThreadPoolExecutor) -> None:
        """Write the pending group, and drop it before the next one gathers."""
        group, self._pending = self._pending, []
        received = [spans for pending in group for spans in pending.received]
        failed = await asyncio.get_running_loop().run_in_executor(disk, self._store.commit, received)
        self._disk_works = len(failed) < len({spans.sender for spans in received}) or not received
        for pending in group:
            self._pending_bytes -= pending.size_bytes
            _resolve(pending, failed)

    def close(self) -> None:
        """Let `run` end when nothing waits for the disk."""
        self._is_closing = True
        self._wake.set()


async def _in_turns(work: InSlices[_T]) -> _T:
    """Do some work, and let other tasks run wherever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return cast("_T", done.value)
        await asyncio.sleep(0)


def _resolve(pending: _Pending, failed: dict[Sender, OSError]) -> None:
    """Resolve the future of a request whose spans are on disk or cannot be written."""
    if pending.done.done():  # its sender has gone
        return
    error = next((failed[spans.sender] for spans in pending.received if spans.sender in failed), None)
    if error is None:
        pending.done.set_result(None)
    else:
        pending.done.set_exception(BusyError(f"cannot be written ({error.strerror})", "disk"))
