"""ForwardPassMetrics of running engines: messages from ZMQ publishers become lines of a run folder for each endpoint.

A message has three frames: topic, sequence number (eight bytes, big-endian) and record. A publisher keeps
nothing and sends nothing again. Lost messages are counted: by the gaps of the sequence if they were not sent
or not read in time, by cause if they could not be written. The messages of a second are one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Literal, TypeAlias

import zmq
import zmq.asyncio

from tracefit.receive.intake import BusyError
from tracefit.receive.spans import Sender, SenderSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.receive.intake import Intake

MessageCause: TypeAlias = Literal["frames", "too_long", "malformed", "version", "disk"]
"""Why a message is refused.

`frames`: not three frames, or the second is not a number of eight bytes. `too_long`: longer than any record.
`malformed`: not a record. `version`: another version than the supported one. `disk`: the disk is full, slow
or cannot be written.
"""

_FRAMES, _SEQUENCE_BYTES = 3, 8
MESSAGE_BYTES = 4 << 10
"""Longest message; a usual one has 500 bytes."""
_FRAME_BYTES = 4 * MESSAGE_BYTES
"""Longest frame that ZMQ reads: a connection with a longer one is closed, and made again."""
_QUEUED_MESSAGES = 4096
"""Messages of one publisher that ZMQ queues before it drops any."""
_QUEUED_LINES = 16_384
"""Lines that may wait for the disk: above this, no message is read."""
_WRITE_S = 1.0
_RECONNECT_S = 0.1
_CUT_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_MOST_LOST = 1 << 32
"""Largest jump of a sequence that counts as lost messages; a larger one is another sequence."""


_Line: TypeAlias = tuple[bytes, float]
"""A record as a line of a trace file, and the time of its step in seconds; 0 if it is a heartbeat."""
ReadRecord: TypeAlias = 'Callable[[bytes, int], _Line | Literal["malformed", "version"]]'
"""Makes a line of a message and the time of its receipt in unix ns, or returns why there is no line."""


class Publisher:
    """One endpoint: its records on disk, and the messages that are lost or refused.

    Attributes:
        records: Records on disk.
        lost_messages: Numbers missing from the sequence.
        refused: Messages refused, by cause.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.records = 0
        self.lost_messages = 0
        self.refused: Counter[MessageCause] = Counter()
        # The name of its run folder has no scheme and no colons.
        self.sender = Sender(endpoint.removeprefix("tcp://").replace(":", "-"), "", "steps")
        self._last: int | None = None

    def count(self, sequence: bytes) -> None:
        """Count the numbers between the last message and this one; a publisher that starts again begins at 0."""
        number = int.from_bytes(sequence, "big")
        if self._last is not None and 0 < number - self._last <= _MOST_LOST:
            self.lost_messages += number - self._last - 1
        self._last = number


class StepRecorder:
    """Reads the messages of publishers and hands them to the intake, which writes them."""

    def __init__(self, endpoints: Sequence[str], read_record: ReadRecord, intake: Intake) -> None:
        self.publishers = [Publisher(endpoint) for endpoint in dict.fromkeys(endpoints)]
        self._context = zmq.asyncio.Context()
        self._read_record = read_record
        self._intake = intake
        self._lines = defaultdict[Publisher, list[_Line]](list)
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_stopping = asyncio.Event()
        self._reading: list[asyncio.Task[None]] = []
        self._writing: asyncio.Task[None] | None = None
        self._news: list[str] = []

    def _socket(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.MAXMSGSIZE, _FRAME_BYTES)
        socket.set(zmq.RCVHWM, _QUEUED_MESSAGES)
        socket.set(zmq.IPV6, int(endpoint.startswith("tcp://[")))
        socket.set(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def start(self) -> None:
        """Begin to connect; a publisher may start later, or again."""
        self._reading = [asyncio.create_task(self._read(publisher)) for publisher in self.publishers]
        self._writing = asyncio.create_task(self._write_now_and_then())

    async def stop(self) -> None:
        """Stop reading, and return once everything read is on disk; the intake must still run."""
        for task in self._reading:
            task.cancel()
        for task in self._reading:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)
        self._is_stopping.set()
        if self._writing is not None:
            await self._writing

    def news(self) -> list[str]:
        """Return a line for each cause and endpoint that is new since the last call."""
        news, self._news = self._news, []
        return news

    async def _read(self, publisher: Publisher) -> None:
        while True:
            with self._socket(publisher.endpoint) as socket, socket.get_monitor_socket(_CUT_EVENTS) as cut:
                await self._read_connection(publisher, socket, cut)
                socket.disable_monitor()
            # ZMQ itself does not connect again after a connection that broke its rules.
            await asyncio.sleep(_RECONNECT_S)

    async def _read_connection(self, publisher: Publisher, socket: zmq.asyncio.Socket, cut: zmq.asyncio.Socket) -> None:
        """Read until the connection has ended and all its messages are taken."""
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(cut, zmq.POLLIN)
        while True:
            await self._has_room.wait()
            has_ended = cut in dict(await poller.poll())
            try:
                frames = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if has_ended:
                    return
                continue
            self._take(publisher, frames, time.time_ns())
            if sum(map(len, self._lines.values())) >= _QUEUED_LINES:
                self._has_room.clear()
            # Reading does not wait while messages are queued: other tasks have their turn here.
            await asyncio.sleep(0)

    def _take(self, publisher: Publisher, frames: list[bytes], received_at_ns: int) -> None:
        if len(frames) != _FRAMES or len(frames[1]) != _SEQUENCE_BYTES:
            self._refuse(publisher, "frames")
            return
        publisher.count(frames[1])
        if sum(map(len, frames)) > MESSAGE_BYTES:
            self._refuse(publisher, "too_long")
            return
        record = self._read_record(frames[2], received_at_ns)
        if isinstance(record, str):
            self._refuse(publisher, record)
        else:
            self._lines[publisher].append(record)

    def _refuse(self, publisher: Publisher, cause: MessageCause, messages: int = 1) -> None:
        if cause not in publisher.refused:
            self._news.append(f"messages of {publisher.endpoint} are refused ({cause})")
        publisher.refused[cause] += messages

    async def _write_now_and_then(self) -> None:
        while not self._is_stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_S):
                    await self._is_stopping.wait()
            await self._write()
        await self._write()

    async def _write(self) -> None:
        lines_of, self._lines = self._lines, defaultdict(list)
        self._has_room.set()
        for publisher, lines in lines_of.items():
            payload = b"".join(text for text, _ in lines)
            try:
                await self._intake.write([SenderSpans(publisher.sender, payload, len(lines))])
            except BusyError:
                self._refuse(publisher, "disk", len(lines))
            else:
                publisher.records += len(lines)
                self._intake.observed.steps += sum(wall_time_s > 0 for _, wall_time_s in lines)
