"""Options of the receiver, its limits, and how sizes and times are written on the command line.

Limits are not options of the command line: they bound the memory that any sender can make the receiver use.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from tracefit.errors import UsageError
from tracefit.options import OptionFlag, keys_of, named, option

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_TIME_UNITS = {"S": 1.0, "MIN": 60.0, "H": 3600.0}
_AMOUNT = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)")
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255}):([0-9]{1,5})")
_OTHER_DESCRIPTORS = 256  # trace files, and what is open anyway
_MIN_TOKEN_BYTES, _MAX_TOKEN_BYTES = 16, 4096  # 16 hexadecimal digits are 64 bits; headers hold 16 KiB


class Rotation(msgspec.Struct, frozen=True):
    """When the receiver closes a trace file and begins the next: at this size, or this long after its first record."""

    size_bytes: int = 64 << 20
    seconds: float = 300.0

    def __str__(self) -> str:
        """Return what `--rotate` reads."""
        return f"{self.size_bytes >> 20}MiB,{self.seconds / 60:g}min"


class IntakeLimits(msgspec.Struct, frozen=True):
    """Limits of the memory that one sender, and all senders, can make the receiver use.

    Attributes:
        message_bytes: Longest request, as sent and decompressed.
        header_bytes: Longest headers of a request.
        readers: Requests that are read and decoded at the same time.
        queued_requests: Requests that wait, unread, for one of these readers; the next one is refused.
        queue_s: How long a request waits, at most.
        read_s: How long a sender may take to deliver a request.
        pending_bytes: Bytes that wait for the disk, and bytes of long requests that wait for their turn. Above this
            limit, requests are refused before they are read; above a quarter of it, long ones are refused before they
            are decoded.
        connections: Connections of a port; beyond it, the connections that have been silent longest are closed.
        connections_of_address: The same for connections from one address.
        accepted: Connections of a port at any moment; more are refused at once.
        idle_s: How long a connection is kept without a request.
        senders: Senders, each a pair of service and instance, that may be active at once; the requests of another one
            are refused until one of them is silent.
        sender_idle_s: Silence after which a sender is not active.
        drain_s: How long requests in progress may take to end when the receiver stops.
    """

    # gRPC's limit of 4 MiB is less than a batch of step spans with snapshots can be.
    message_bytes: int = 16 << 20
    header_bytes: int = 16 << 10
    readers: int = 4
    queued_requests: int = 1024
    queue_s: float = 5.0
    read_s: float = 10.0
    pending_bytes: int = 64 << 20
    # A fleet of some hundred servers, each with a connection for each of its processes.
    connections: int = 1024
    connections_of_address: int = 512
    accepted: int = 1536
    idle_s: float = 75.0  # longer than the SDK's five seconds between exports: a sender keeps its connection
    senders: int = 4096  # two thousand servers of two processes each; each may fill the disk with a folder
    sender_idle_s: float = 600.0  # a server that is restarted under a new name stays active so long under the old one
    drain_s: float = 5.0  # less than the ten seconds of `docker stop`

    def within(self, descriptors: int) -> IntakeLimits:
        """Return limits of connections for which a process with so many descriptors has enough, in the same
        proportion.
        """
        accepted = min(self.accepted, max((descriptors - _OTHER_DESCRIPTORS) // 2, 1))
        part = accepted / self.accepted
        return replace(
            self,
            accepted=accepted,
            connections=max(int(self.connections * part), 1),
            connections_of_address=max(int(self.connections_of_address * part), 1),
        )


ReceiveOutOption = Annotated[
    str | Path,
    OptionFlag("Folder for run folders; each service that sends gets one.", "out", kind=Path),
]
ServedModelOption = Annotated[str | None, OptionFlag("Model that the servers run, as `vllm serve` names it.")]
LiveOption = Annotated[bool, OptionFlag("Show on the terminal what comes in.", "live")]
WatchedModelsOption = Annotated[
    str | Path | None,
    OptionFlag(
        "Coefficient files of the servers; --live and --metrics show their errors on the steps that come in.",
        "models",
        kind=Path | None,
    ),
]


def parse_duration(text: str) -> float:
    """Read `90s`, `5min` or `1h`, in seconds.

    Raises:
        UsageError: The text is not a time above zero.
    """
    seconds = _amount(text, _TIME_UNITS)
    if not seconds > 0:
        raise UsageError(f"{text!r} is not a time", hint="for example 5min or 30s")
    return seconds


def _amount(text: str, units: Mapping[str, float]) -> float:
    """Return a number times its unit; 0 if the text is not a number with a unit."""
    match = _AMOUNT.fullmatch(text.strip())
    return float(match[1]) * units.get(match[2].upper(), 0) if match else 0.0


def parse_rotation(text: str) -> Rotation:
    """Read `--rotate`: a size, a time, or both with a comma between; a missing one keeps its default.

    Raises:
        UsageError: One of them is neither.
    """
    rotation = Rotation()
    for part in text.split(","):
        match = _AMOUNT.fullmatch(part.strip())
        if match and match[2].upper() in _TIME_UNITS:
            rotation = replace(rotation, seconds=parse_duration(part))
        else:
            rotation = replace(rotation, size_bytes=int(_amount(part, _SIZE_UNITS)))
        if rotation.size_bytes < 1:
            raise UsageError(f"{part!r} is not a size", hint="for example 64MiB")
    return rotation


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """Where the receiver listens, who may send, and which data are written.

    Attributes:
        host: Address to listen on; an address other than loopback needs TLS or --insecure.
        grpc_port: Port of OTLP/gRPC; 0 takes a free port.
        http_port: Port of OTLP/HTTP; 0 takes a free port.
        tls_cert: PEM file of the certificate chain; needs --tls-key.
        tls_key: PEM file of the certificate's private key.
        insecure: Listen to other machines without TLS, or read ForwardPassMetrics from them.
        token_file: File with the token that senders present as `authorization: Bearer TOKEN`.
        forward_pass_metrics: Also record ForwardPassMetrics from this ZMQ publisher; repeatable. A publisher on another
            machine needs --insecure.
        rotation: Begin a new trace file at this size, or after this time.
        metrics: Answer GET /metrics on the HTTP port, for Prometheus.
        stop_after_s: Stop after this time, such as 10min; if not given, run until SIGTERM.
        all_spans: Keep names and attributes of spans of other services too.
        keep_attributes: Span attributes to keep in addition to ids, counts, routes, the model and sampling parameters;
            repeatable.
        limits: Bounds on memory and time.
    """

    host: str = option("127.0.0.1")
    grpc_port: int = option(4317, minimum=0, maximum=65535)
    http_port: int = option(4318, minimum=0, maximum=65535)
    tls_cert: Path | None = option(None)
    tls_key: Path | None = option(None)
    insecure: bool = option(default=False)
    token_file: Path | None = option(None)
    forward_pass_metrics: tuple[str, ...] = option((), metavar="tcp://HOST:PORT")
    rotation: Rotation = option(Rotation(), flag="--rotate", metavar="SIZE,TIME", kind=str, read=parse_rotation)
    metrics: bool = option(default=False)
    stop_after_s: float | None = option(None, flag="--stop-after", metavar="TIME", kind=str | None, read=parse_duration)
    all_spans: bool = option(default=False)
    keep_attributes: tuple[str, ...] = option((), metavar="KEY,...", read=keys_of)
    limits: IntakeLimits = field(default_factory=IntakeLimits)

    def require_safe(self) -> None:
        """Refuse to listen where others could read along or send.

        Raises:
            UsageError: Half a TLS configuration, an address beyond this machine without TLS, or no endpoint.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError(f"{_tls()} go together", hint="give both, or neither")
        if not (self.tls_cert or self.insecure or _is_loopback(self.host)):
            raise UsageError(
                (
                    f"{named(ReceiveOptions, 'host')} {self.host}: other machines could send and read along without "
                    "encryption"
                ),
                hint=f"give {_tls()}, or say {named(ReceiveOptions, 'insecure')}",
            )
        for endpoint in self.forward_pass_metrics:
            self._require_safe_endpoint(endpoint)

    def _require_safe_endpoint(self, endpoint: str) -> None:
        option_name = named(ReceiveOptions, "forward_pass_metrics")
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or not 1 <= int(match[2]) <= 65_535:
            fault = f"{option_name} {endpoint[:200]!r}: not an endpoint"
            raise UsageError(fault, hint="for example tcp://127.0.0.1:20380")
        if not (self.insecure or _is_loopback(match[1].strip("[]"))):
            fault = f"{option_name} {endpoint}: ZMQ has no authentication here, and no encryption"
            hint = f"if the network itself is safe, say {named(ReceiveOptions, 'insecure')}"
            raise UsageError(fault, hint=hint)


def _tls() -> str:
    return f"{named(ReceiveOptions, 'tls_cert')} and {named(ReceiveOptions, 'tls_key')}"


def _is_loopback(host: str) -> bool:
    """Return whether an address is reached only from this machine; a name other than localhost may not be."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Token:
    """The secret that senders must present; without a file, every sender is accepted."""

    def __init__(self, path: Path | None) -> None:
        self._expected = None if path is None else b"Bearer " + _read_token(path)

    def accepts(self, authorization: str | bytes) -> bool:
        """Return whether the value of an `authorization` header is right."""
        # Compared in constant time: how long a refusal takes says nothing about the token.
        value = authorization.encode() if isinstance(authorization, str) else authorization
        return self._expected is None or hmac.compare_digest(value, self._expected)


def _read_token(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            token = stream.readline(_MAX_TOKEN_BYTES + 2).strip()
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", where=str(path)) from error
    if not _MIN_TOKEN_BYTES <= len(token) <= _MAX_TOKEN_BYTES or not token.isascii() or b" " in token:
        raise UsageError(
            f"the first line must be a token of {_MIN_TOKEN_BYTES} or more ASCII characters without blanks",
            where=str(path),
            hint="`openssl rand -hex 32` makes one",
        )
    return token
