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
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tracefit.receive.options import IntakeLimits

_CHECK_PEERS_S = 0.25
_DESCRIPTORS = 4096
_FOLDER = Path("/dev/fd")
_LAST_DATA_RECEIVED = slice(52, 56)  # of Linux's tcp_info: milliseconds since the last data came


def want_descriptors() -> int:
    """Raise the limit of open descriptors above the usual 1,024 if the system allows it; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


async def keep_few(ports: Collection[int], limits: IntakeLimits, closed: Callable[[int], None]) -> None:
    """Close connections beyond the limits, again and again, until cancelled; `closed` receives their number."""
    while True:
        await asyncio.sleep(_CHECK_PEERS_S)
        for port in ports:
            closed(close_silent(port, limits))


def close_silent(port: int, limits: IntakeLimits) -> int:
    """Close the connections beyond the limits of an address and of the port; return their number."""
    # Counting is cheap, and nearly always shows that there is nothing to do.
    if len(list(_FOLDER.iterdir())) <= limits.connections_of_address:
        return 0
    open_ones: list[Connection] = []
    closing: list[Connection] = []
    of_address: Counter[str] = Counter()
    for each in sorted(connections_of(port)):
        of_address[each.host] += 1
        is_beyond = of_address[each.host] > limits.connections_of_address or len(open_ones) >= limits.connections
        (closing if is_beyond else open_ones).append(each)
    for each in closing:
        with contextlib.suppress(OSError), _duplicate(each.descriptor) as connection:
            if connection.getpeername()[:2] == (each.host, each.port):  # not a later one with this descriptor
                connection.shutdown(socket.SHUT_RDWR)
    return len(closing)


class Connection(NamedTuple):
    """A connection to a port of this process: since when nothing has come, who made it, and its descriptor."""

    silent_ms: int
    host: str
    port: int
    descriptor: int


def connections_of(port: int) -> Iterator[Connection]:
    """Yield the connections to a port."""
    for entry in _FOLDER.iterdir():
        descriptor = int(entry.name)
        # A descriptor may be closed meanwhile or be a file; a listening socket has no peer; names of Unix sockets have
        # no parts.
        with contextlib.suppress(OSError, ValueError), _duplicate(descriptor) as connection:
            _, own_port, *_ = connection.getsockname()
            host, peer_port, *_ = connection.getpeername()
            if own_port == port:
                yield Connection(_silent_ms(connection), host, peer_port, descriptor)


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """Open a socket a second time, so that it cannot become another one meanwhile.

    Raises:
        OSError: The descriptor is not a socket, or is closed.
    """
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # it leaves the descriptor open
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
