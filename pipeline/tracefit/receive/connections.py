"""Close the connections that have been silent longest if there are too many, so that they do not keep others out.

gRPC's library has no limit per address, and neither it nor a TLS handshake says which connections are silent.
The operating system knows both for every socket of this process. If it closes a connection, the owner sees
the sender hang up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tracefit.receive.options import IntakeLimits

_CHECK_S = 0.25
_DESCRIPTORS = 4096
_FOLDER = Path("/dev/fd")
_LAST_DATA_RECEIVED = slice(52, 56)  # of Linux's tcp_info: milliseconds since the last data came


def want_descriptors() -> None:
    """Raise the limit of open descriptors above the usual 1,024 if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def keep_few(ports: Collection[int], limits: IntakeLimits, closed: Callable[[int], None]) -> None:
    """Close connections beyond the limits, again and again, until cancelled; `closed` receives their number."""
    while True:
        await asyncio.sleep(_CHECK_S)
        for port in ports:
            closed(close_silent(port, limits))


def close_silent(port: int, limits: IntakeLimits) -> int:
    """Close the connections beyond the limits of an address and of the port; return their number."""
    # Counting is cheap, and nearly always shows that there is nothing to do.
    if len(list(_FOLDER.iterdir())) <= limits.connections_of_address:
        return 0
    kept: list[_Accepted] = []
    closing: list[_Accepted] = []
    of_address: Counter[str] = Counter()
    for each in sorted(_accepted(port)):
        of_address[each.host] += 1
        is_beyond = of_address[each.host] > limits.connections_of_address or len(kept) >= limits.connections
        (closing if is_beyond else kept).append(each)
    for each in closing:
        with contextlib.suppress(OSError), _duplicate(each.descriptor) as connection:
            if connection.getpeername()[:2] == (each.host, each.port):  # and not another's, opened meanwhile
                connection.shutdown(socket.SHUT_RDWR)
    return len(closing)


class _Accepted(NamedTuple):
    """A connection to a port of this process: since when nothing has come, who made it, and its descriptor."""

    silent_ms: int
    host: str
    port: int
    descriptor: int


def _accepted(port: int) -> Iterator[_Accepted]:
    for entry in _FOLDER.iterdir():
        descriptor = int(entry.name)
        # Some sockets are closed meanwhile; listening ones have no peer; names of Unix sockets have no parts.
        with contextlib.suppress(OSError, ValueError), _duplicate(descriptor) as connection:
            _, own_port, *_ = connection.getsockname()
            host, peer_port, *_ = connection.getpeername()
            if own_port == port:
                yield _Accepted(_silent_ms(connection), host, peer_port, descriptor)


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """Open a socket a second time: it cannot become another one while it is looked at.

    Raises:
        OSError: The descriptor is not a socket, or is closed.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with connection:
        yield connection


def _silent_ms(connection: socket.socket) -> int:
    """Return how long ago the last data came; 0 if the system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.stop)
    return int.from_bytes(state[_LAST_DATA_RECEIVED], sys.byteorder)
