"""From a request to its acknowledgement, for both protocols: admission, decoding, and one disk write for many requests.

A request waits for one of a few places before any of it is read, so that memory is bounded by what those hold and by
what waits for the disk. While one group of requests is written and synced, the next one gathers: a lone sender waits for
one sync, sixty-four of them share it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple

from tracefit.errors import DataError
from tracefit.receive.spans import RequestError, gunzip, protobuf_of_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tracefit.receive.observed import Observed
    from tracefit.receive.options import IntakeLimits
    from tracefit.receive.spans import PrivacyFilter, Sender, SenderSpans
    from tracefit.receive.store import TraceStore

BodyEncoding = Literal["protobuf", "json"]

TRACES_ALONE = "tracefit receives traces alone; set OTEL_METRICS_EXPORTER=none and OTEL_LOGS_EXPORTER=none"
TOKEN_NEEDED = "a token is needed, as `authorization: Bearer …`"  # noqa: S105 - a message

# A place is free again in a moment; a disk that is full or slow takes longer.
RETRY_BUSY_S, RETRY_DISK_S = 1, 5
_GZIP_MAGIC = b"\x1f\x8b"


class BusyError(DataError):
    """A request that can be sent again, after `retry_s` seconds."""

    def __init__(self, what: str, retry_s: int) -> None:
        super().__init__(what)
        self.retry_s = retry_s


class _Pending(NamedTuple):
    """Spans that wait for the disk, and the future of the request they came in."""

    received: list[SenderSpans]
    size_bytes: int
    done: asyncio.Future[None]


class Intake:
    """Takes requests in. `run` must be going on for any of them to be acknowledged."""

    def __init__(
        self, store: TraceStore, privacy: PrivacyFilter, observed: Observed, limits: IntakeLimits
    ) -> None:
        self.observed = observed
        self.limits = limits
        self.spans_by_sender: Counter[Sender] = Counter()
        self._store = store
        self._privacy = privacy
        self._places = asyncio.Semaphore(limits.readers)
        self._waiting = 0
        self._senders: set[Sender] = set()
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._is_closing = False

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
            encoding: What the body is.
            is_gzip: Whether it is compressed; found out from its first bytes if None.

        Raises:
            RequestError: It is no request of traces; sending it again is of no use.
            BusyError: There is no room for it now.
        """
        try:
            async with self._place():
                async with asyncio.timeout(self.limits.read_s):
                    body = await read()
                received = self._decode(body, encoding, is_gzip=is_gzip)
                del body  # a decoded request would otherwise hold its bytes until the disk has them
            await self.write(received)
        except TimeoutError:
            self.observed.refused += 1
            raise BusyError(f"not delivered within {self.limits.read_s:g} s", RETRY_BUSY_S) from None
        except DataError:
            self.observed.refused += 1
            raise
        for sender, _, count in received:
            self.spans_by_sender[sender] += count
            self.observed.spans += count
        self.observed.exports += 1

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold one of the places for requests that are read and decoded."""
        # Before anything is read: what is refused has cost no memory.
        if self._pending_bytes > self.limits.pending_bytes:
            raise BusyError("the disk does not keep up", RETRY_DISK_S)
        if self._waiting >= self.limits.queued_requests:
            raise BusyError("too many requests at once", RETRY_BUSY_S)
        self._waiting += 1
        try:
            async with asyncio.timeout(self.limits.queue_s):
                await self._places.acquire()
        except TimeoutError:
            raise BusyError("too many requests at once", RETRY_BUSY_S) from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    def _decode(self, body: bytes, encoding: BodyEncoding, *, is_gzip: bool | None) -> list[SenderSpans]:
        # No protobuf message begins like gzip: its first byte would be a field of a wire type that does not exist.
        if is_gzip or (is_gzip is None and body.startswith(_GZIP_MAGIC)):
            body = gunzip(body, limit_bytes=self.limits.message_bytes)
        if encoding == "json":
            body = protobuf_of_json(body)
        received = self._privacy.by_sender(body, self.observed)
        # A sender that makes up an instance per request must not fill the disk with folders.
        senders = self._senders.union(spans.sender for spans in received)
        if len(senders) > self.limits.folders:
            raise RequestError(f"more than {self.limits.folders:,} different service.instance.ids")
        self._senders = senders
        return received

    async def write(self, received: list[SenderSpans]) -> None:
        """Return once all of it is on disk.

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
        """Write what comes, group by group, until `close` and everything is written."""
        loop = asyncio.get_running_loop()
        # fsync blocks, which the event loop must not; one thread keeps the order of records in a file.
        with ThreadPoolExecutor(1, thread_name_prefix="disk") as disk:
            while not (self._is_closing and not self._pending):
                await self._wake.wait()
                self._wake.clear()
                group, self._pending = self._pending, []
                received = [spans for pending in group for spans in pending.received]
                failed = await loop.run_in_executor(disk, self._store.commit, received)
                for pending in group:
                    self._pending_bytes -= pending.size_bytes
                    _resolve(pending, failed)
            await loop.run_in_executor(disk, self._store.close)

    def close(self) -> None:
        """Let `run` end when nothing waits for the disk."""
        self._is_closing = True
        self._wake.set()


def _resolve(pending: _Pending, failed: dict[Sender, OSError]) -> None:
    """Tell a request whether it is on disk."""
    if pending.done.done():  # its sender has gone
        return
    errors = [failed[spans.sender] for spans in pending.received if spans.sender in failed]
    if errors:
        pending.done.set_exception(BusyError(f"cannot be written ({errors[0].strerror})", RETRY_DISK_S))
    else:
        pending.done.set_result(None)
