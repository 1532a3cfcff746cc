"""Lines of container runtimes and of the journal: Docker's `{"log": …}`, CRI's `TIME stdout F …`, and journald's JSON.

The runtime cuts a long line into parts, which are joined again. The printed text is the content; before a line whose
time counts, as recordings declare (`Recording.stamped`), come the time and the labels that the runtime gave it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tracefit.inputs.compression import Gap
from tracefit.inputs.containers.base import CONTAINER_HEAD_BYTES, Container, peeked, register
from tracefit.inputs.containers.elements import UNREADABLE_JSON, joined, lines_in
from tracefit.inputs.formats import RECORDINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.inputs.compression import Piece

_DOCKER_PART_BYTES = 16 << 10
"""Docker cuts lines at this length."""

_NO_LABELS: dict[str, Any] = {}


class Entry(NamedTuple):
    """A line, or a part of one, as its container has it.

    Attributes:
        text: The printed text, without line end.
        time: Its time, as ISO 8601; empty if unknown.
        labels: Other facts that the container has of it.
        stream: The lines whose parts belong together.
        is_part: Whether the line goes on with the next entry of the stream.
    """

    text: bytes
    time: str = ""
    labels: dict[str, Any] = _NO_LABELS
    stream: str = ""
    is_part: bool = False


def marks() -> tuple[bytes, ...]:
    """Return the parts of lines whose time counts."""
    return tuple(mark for recording in RECORDINGS.values() for mark in recording.stamped)


def printed(entries: Iterator[Entry | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
    """Yield the lines that were printed, as content; parts are joined."""
    return joined(_whole(entries, most_bytes))


def _whole(entries: Iterator[Entry | Gap], most_bytes: int) -> Iterator[bytes | Gap]:
    stamped = marks()
    parts: dict[str, list[bytes]] = {}
    sizes: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, Gap):
            yield entry
            continue
        text, stream = entry.text, entry.stream
        if entry.is_part or stream in parts:
            parts.setdefault(stream, []).append(text)
            sizes[stream] = sizes.get(stream, 0) + len(text)
            if sizes[stream] > most_bytes:
                parts[stream] = [text]  # the rest of a line that is too long
                yield Gap(f"line longer than {most_bytes >> 20} MiB", record=text[:4096])
                sizes[stream] = len(text)
            if entry.is_part:
                continue
            text = b"".join(parts.pop(stream))
            del sizes[stream]
        if any(mark in text for mark in stamped):
            yield _stamped(entry, text)
        else:
            yield text + b"\n"
    for left in parts.values():
        yield b"".join(left) + b"\n"


def _stamped(entry: Entry, text: bytes) -> bytes:
    labels = msgspec.json.encode(entry.labels) + b" " if entry.labels else b""
    time = entry.time.encode() + b" " if entry.time else b""
    return b"%b%b%b\n" % (labels, time, text)


# -- Docker -----------------------------------------------------------------------------------------------


class _Docker(msgspec.Struct):
    log: str
    stream: str = ""
    time: str = ""


_DOCKER, _OBJECT = msgspec.json.Decoder(_Docker), msgspec.json.Decoder(dict[str, Any])
_DOCKER_KEYS = frozenset({"log", "stream", "time"})
_STREAM_LINE_END = b'\\n"'
_DOCKER_FIND = re.compile(rb'\{[^\n]{0,2000}?"log"\s*:\s*"')


def _docker_line(line: bytes, stamped: tuple[bytes, ...] = ()) -> tuple[_Docker, dict[str, Any]] | None:
    try:
        read = _DOCKER.decode(line)
        labels = _NO_LABELS
        # Other keys are rare: Docker's own options, and those of collectors that pass its lines on.
        if line.count(b'":') > len(_DOCKER_KEYS) and any(mark in line for mark in stamped):
            labels = {k: v for k, v in _OBJECT.decode(line).items() if k not in _DOCKER_KEYS}
    except UNREADABLE_JSON:
        return None
    return read, labels


def _docker(lines: Iterator[bytes | Gap], *, has_ends: bool) -> Iterator[Entry | Gap]:
    stamped = marks()
    for line in lines:
        if isinstance(line, Gap):
            yield line
        elif line.strip():
            read = _docker_line(line.strip(), stamped)
            if read is None:
                yield Gap("not a line of Docker's", record=line)
                continue
            entry, labels = read
            is_ended = entry.log.endswith("\n")
            has_ends = has_ends or is_ended
            text = entry.log.removesuffix("\n").removesuffix("\r").encode(errors="replace")
            is_part = not is_ended and (has_ends or len(text) >= _DOCKER_PART_BYTES)
            # Parts are kept for each stream: there are two, whatever a file says.
            stream = "stderr" if entry.stream == "stderr" else ""
            yield Entry(text, entry.time, labels, stream, is_part)


def _read_docker(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
    head, content = peeked(content, CONTAINER_HEAD_BYTES)
    # Collectors that pass lines on drop their ends.
    entries = _docker(lines_in(content, most_bytes), has_ends=_STREAM_LINE_END in head)
    return printed(entries, most_bytes)


def _is_docker(head: bytes) -> bool:
    if not _DOCKER_FIND.match(head):
        return False
    line = head.partition(b"\n")[0]
    if len(line) == len(head):  # it is longer than the head
        return head.startswith((b'{"log":"', b'{"log": "'))
    return _docker_line(line.strip()) is not None


DOCKER = register(
    Container(
        name="docker",
        title="lines of Docker's json-file driver",
        holds="all",
        version="json-file, of any version",
        source="https://docs.docker.com/engine/logging/drivers/json-file/",
        find=_is_docker,
        read=_read_docker,
    )
)

# -- CRI --------------------------------------------------------------------------------------------------

_CRI = re.compile(
    rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,18}(?:Z|[+-][0-9]{2}:[0-9]{2})) (stdout|stderr) ([FP])(?::[^ ]{0,99})? ",
)


def _cri(lines: Iterator[bytes | Gap]) -> Iterator[Entry | Gap]:
    for line in lines:
        if isinstance(line, Gap):
            yield line
        elif match := _CRI.match(line if line.endswith(b" ") or len(line) > 64 else line + b" "):
            time, stream, tag = match.groups()
            yield Entry(line[match.end() :], time.decode(), stream=stream.decode(), is_part=tag == b"P")
        elif line.strip():
            yield Gap("not a line of a container runtime", record=line)


CRI = register(
    Container(
        name="cri",
        title="lines of a Kubernetes container runtime (CRI)",
        holds="all",
        version="the kubelet's log format of 2016",
        source="https://github.com/kubernetes/design-proposals-archive/blob/main/node/kubelet-cri-logging.md",
        find=lambda head: bool(_CRI.match(head)),
        read=lambda content, most_bytes: printed(_cri(lines_in(content, most_bytes)), most_bytes),
    )
)

# -- CloudWatch's export ----------------------------------------------------------------------------------

_EXPORTED = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,18}Z) (?=\{\s*\"resourceSpans\")")
"""Only lines of spans: in a log a time before the text belongs to the line."""


def _exported(lines: Iterator[bytes | Gap]) -> Iterator[Entry | Gap]:
    for line in lines:
        if isinstance(line, Gap):
            yield line
        elif match := _EXPORTED.match(line):
            yield Entry(line[match.end() :], match[1].decode())
        elif line.strip():
            yield Gap("not a line of an export with spans", record=line)


CLOUDWATCH_LINES = register(
    Container(
        name="cloudwatch_s3",
        title="lines of CloudWatch's export to S3",
        holds="traces",
        version="export tasks of 2026",
        source="https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/S3Export.html",
        find=lambda head: bool(_EXPORTED.match(head)),
        read=lambda content, most_bytes: printed(_exported(lines_in(content, most_bytes)), most_bytes),
    )
)

# -- journald ---------------------------------------------------------------------------------------------


class _Journal(
    msgspec.Struct,
    rename={
        "message": "MESSAGE",
        "real_us": "__REALTIME_TIMESTAMP",
        "host": "_HOSTNAME",
        "pid": "_PID",
        "unit": "_SYSTEMD_UNIT",
        "identifier": "SYSLOG_IDENTIFIER",
    },
):
    message: str | list[int] | None = None
    real_us: str = ""
    host: str = ""
    pid: str = ""
    unit: str = ""
    identifier: str = ""


_JOURNAL = msgspec.json.Decoder(_Journal)
_UNSAFE_IN_NAMES = re.compile(r"[^A-Za-z0-9._@-]")


def _journal(lines: Iterator[bytes | Gap]) -> Iterator[Entry | Gap]:
    for line in lines:
        if isinstance(line, Gap):
            yield line
            continue
        if not line.strip():
            continue
        try:
            read = _JOURNAL.decode(line)
            # A text with control characters, such as colours, is a list of its bytes.
            message = (
                read.message if isinstance(read.message, str) else bytes(read.message or ()).decode(errors="replace")
            )
            time = iso_of_ns(int(read.real_us) * 1000) if read.real_us else ""
        except UNREADABLE_JSON:
            yield Gap("not an entry of the journal", record=line)
            continue
        name = read.identifier or read.unit
        host = _UNSAFE_IN_NAMES.sub("-", read.host)
        sender = f"{host} {_UNSAFE_IN_NAMES.sub('-', name)}[{read.pid or 0}]:" if host and name else ""
        yield Entry(message.encode(errors="replace"), f"{time} {sender}".strip())


def iso_of_ns(unix_ns: int) -> str:
    """Return a unix time as ISO 8601 with nanoseconds.

    Raises:
        ValueError: It is before 1970 or later than any date.
    """
    seconds, fraction = divmod(unix_ns, 10**9)
    if not 0 <= seconds < 2**33:
        raise ValueError(unix_ns)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"


_JOURNAL_KEYS: tuple[bytes, ...] = (b'"__REALTIME_TIMESTAMP"', b'"MESSAGE"')

JOURNAL = register(
    Container(
        name="journal",
        title="entries of journalctl -o json",
        holds="all",
        version="entries since systemd 38",
        source="https://systemd.io/JOURNAL_EXPORT_FORMATS/",
        find=lambda head: head.startswith(b"{") and all(key in head for key in _JOURNAL_KEYS),
        read=lambda content, most_bytes: printed(_journal(lines_in(content, most_bytes)), most_bytes),
    )
)
