"""From a request to its acknowledgement, whatever the protocol: admission, decoding, and one disk write for many.

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
    from tracefit.receive.spans import Part, PrivacyFilter, Sender
    from tracefit.receive.store import TraceStore

Encoding = Literal["protobuf", "json"]

RETRY_BUSY_S, RETRY_DISK_S = 1, 5


class BusyError(DataError):
    """A request that can be sent again, after `retry_s` seconds."""

    def __init__(self, what: str, retry_s: int) -> None:
        super().__init__(what)
        self.retry_s = retry_s


class _Pending(NamedTuple):
    """Parts that wait for the disk, and whom to tell."""

    parts: list[Part]
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
        encoding: Encoding = "protobuf",
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
                parts = self._decode(body, encoding, is_gzip=is_gzip)
                del body
            await self._written(parts)
        except TimeoutError:
            self.observed.refused += 1
            raise BusyError(f"not delivered within {self.limits.read_s:g} s", RETRY_BUSY_S) from None
        except DataError:
            self.observed.refused += 1
            raise
        for part in parts:
            self.spans_by_sender[part.sender] += part.spans
            self.observed.spans += part.spans
        self.observed.exports += 1

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold one of the places for requests that are read and decoded."""
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

    def _decode(self, body: bytes, encoding: Encoding, *, is_gzip: bool | None) -> list[Part]:
        # No protobuf message begins like gzip: its first byte would be a field of a wire type that does not exist.
        if is_gzip or (is_gzip is None and body.startswith(b"\x1f\x8b")):
            body = gunzip(body, limit_bytes=self.limits.message_bytes)
        if encoding == "json":
            body = protobuf_of_json(body)
        parts = self._privacy.parts(body, self.observed)
        senders = self._senders.union(part.sender for part in parts)
        if len(senders) > self.limits.folders:
            raise RequestError(f"more than {self.limits.folders:,} different service.instance.ids")
        self._senders = senders
        return parts

    async def _written(self, parts: list[Part]) -> None:
        if not parts:
            return
        size = sum(len(part.payload) for part in parts)
        done = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(parts, size, done))
        self._pending_bytes += size
        self._wake.set()
        await done

    async def run(self) -> None:
        """Write what comes, group by group, until `close` and everything is written."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="disk") as disk:
            while not (self._is_closing and not self._pending):
                await self._wake.wait()
                self._wake.clear()
                group, self._pending = self._pending, []
                parts = [part for pending in group for part in pending.parts]
                failed = await loop.run_in_executor(disk, self._store.commit, parts)
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
    errors = [failed[part.sender] for part in pending.parts if part.sender in failed]
    if errors:
        pending.done.set_exception(BusyError(f"cannot be written ({errors[0].strerror})", RETRY_DISK_S))
    else:
        pending.done.set_result(None)
