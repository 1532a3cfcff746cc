from __future__ import annotations

import gzip
import io
import random
import zlib

import pyarrow as pa
import pytest

from tracefit.sources import (
    Frame,
    Reject,
    compression,
    framing,
    json_scan,
    limits,
    read_frames,
    units,
    zstd_frames,
)


def texts_of(otlp, items):
    return [item.payload for item in items if isinstance(item, Frame)]


@pytest.fixture
def lines(otlp):
    """Return records that do not compress well, so that cuts fall into every part of them."""
    rng = random.Random(0)
    records = [otlp.record(otlp.span(n, name=rng.randbytes(900).hex())) for n in range(1, 120)]
    return [otlp.to_json(record) for record in records]


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_cut_stream_gives_all_that_can_be_decompressed_and_one_reject(otlp, lines, how):
    plain = b"".join(line + b"\n" for line in lines)
    packed = otlp.COMPRESSIONS[how](plain)
    for share in (0.1, 0.35, 0.7, 0.99):
        cut = packed[: int(len(packed) * share)]
        *frames, reject = otlp.frames_of(cut)
        assert texts_of(otlp, frames) == lines[: len(frames)]
        assert reject.reason == f"{how} data is cut"
        assert reject.source_offset == sum(len(line) + 1 for line in lines[: len(frames)])
        possible = sum(map(len, _decompressed(cut, how)))
        assert reject.source_offset + reject.length == possible


def _decompressed(cut, how):
    """Decompress by the library's own incremental reader, a byte at a time where Arrow needs that."""
    if how == "gzip":
        while cut:
            inflate = zlib.decompressobj(31)
            yield inflate.decompress(cut)
            cut = inflate.unused_data
        return
    stream = pa.CompressedInputStream(pa.BufferReader(cut), "zstd")
    try:
        while byte := stream.read(1):
            yield byte
    except OSError:
        return


def test_a_stream_that_lost_only_its_checksum_keeps_its_last_record(otlp, lines):
    *frames, reject = otlp.frames_of(gzip.compress(lines[0] + b"\n" + lines[1])[:-3])
    assert texts_of(otlp, frames) == lines[:2]
    assert reject == Reject("-", len(lines[0]) + 1 + len(lines[1]), 0, "gzip data is cut")


def test_a_corrupt_byte_keeps_what_comes_before(otlp, lines):
    packed = bytearray(gzip.compress(b"\n".join(lines)))
    packed[len(packed) // 2] ^= 0xFF
    packed[len(packed) // 2 + 1] ^= 0xFF
    items = otlp.frames_of(bytes(packed))
    assert texts_of(otlp, items)[:10] == lines[:10]
    assert items[-1].reason == "gzip data is corrupt"


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_bytes_behind_the_stream_are_reported(otlp, lines, how):
    items = otlp.frames_of(otlp.COMPRESSIONS[how](lines[0] + b"\n") + b"rubbish behind")
    assert texts_of(otlp, items) == lines[:1]
    assert isinstance(items[-1], Reject)


def test_zeros_behind_a_gzip_member_are_padding(otlp, lines):
    packed = gzip.compress(lines[0] + b"\n") + bytes(700) + gzip.compress(lines[1] + b"\n") + bytes(9)
    assert texts_of(otlp, otlp.frames_of(packed)) == lines[:2]


@pytest.mark.parametrize("pack", [gzip.compress, None])
def test_a_decompression_bomb_is_stopped(otlp, monkeypatch, pack):
    monkeypatch.setattr(units, "FREE_EXPANSION_BYTES", 1 << 20)
    monkeypatch.setattr(units, "MAX_EXPANSION", 100)
    bomb = (pack or otlp.zstd)(b"{" + b" " * (40 << 20))
    items = otlp.frames_of(b"".join([bomb]))
    assert len(items) == 1
    assert "bomb" in items[0].reason or items[0].reason == "not OTLP traces"
    assert items[0].length < 10 << 20


def test_traces_that_compress_well_are_no_bomb(otlp, monkeypatch, lines):
    monkeypatch.setattr(units, "FREE_EXPANSION_BYTES", 0)
    plain = (lines[0] + b"\n") * 2000
    assert len(texts_of(otlp, otlp.frames_of(gzip.compress(plain)))) == 2000


def test_what_is_between_the_objects_of_a_document_is_counted(otlp, lines):
    items = otlp.frames_of(b"[\n" + lines[0] + b",\n oops, \n" + lines[1] + b"\n]")
    assert texts_of(otlp, items) == lines[:2]
    (reject,) = [item for item in items if isinstance(item, Reject)]
    assert reject.reason == "not a JSON object"


def test_a_string_longer_than_a_chunk_does_not_hide_the_end_of_its_object(otlp, monkeypatch, lines):
    monkeypatch.setattr(json_scan, "CHUNK_BYTES", 16)
    monkeypatch.setattr(json_scan, "_DOUBLINGS", 0)
    items = otlp.frames_of(b"[\n" + lines[0] + b",\n" + lines[1] + b"\n] x")
    assert texts_of(otlp, items) == lines[:2]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 40])
def test_a_cut_last_frame_is_one_reject(otlp, size):
    messages = [otlp.to_protobuf(otlp.record(otlp.span(n))) for n in (1, 2)]
    whole = otlp.framed(messages[:1])
    frame, reject = otlp.frames_of(whole + otlp.framed(messages[1:])[:size])
    assert frame.payload == messages[0]
    assert (reject.source_offset, reject.length) == (len(whole), size)
    assert "cut" in reject.reason


@pytest.mark.parametrize("size", [0, 1, 77, 500, 0x0A000000, 2**31, 2**32 - 1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_length_costs_its_record_alone(otlp, size, which):
    messages = [otlp.to_protobuf(otlp.record(otlp.span(n))) for n in (1, 2, 3)]
    parts = [otlp.framed([message]) for message in messages]
    parts[which] = size.to_bytes(4, "big") + messages[which]
    items = otlp.frames_of(b"".join(parts))
    assert texts_of(otlp, items) == messages[:which] + messages[which + 1 :]
    rejects = [item for item in items if isinstance(item, Reject)]
    assert sum(reject.length for reject in rejects) == len(parts[which])


def test_a_cut_bare_message_keeps_its_whole_resources(otlp):
    messages = [otlp.to_protobuf(otlp.record(otlp.span(n))) for n in (1, 2)]
    for size in range(1, len(messages[1])):
        frame, reject = otlp.frames_of(messages[0] + messages[1][:size])
        assert frame.payload == messages[0], size
        assert (reject.source_offset, reject.length) == (len(messages[0]), size)


def test_a_corrupt_zstd_record_costs_itself(otlp):
    parts = [otlp.framed([otlp.zstd(otlp.to_json(otlp.record(otlp.span(n))))]) for n in (1, 2, 3)]
    broken = parts[1][:12] + b"\xff\xff\xff\xff" + parts[1][16:]
    items = otlp.frames_of(parts[0] + broken + parts[2])
    assert len(texts_of(otlp, items)) == 2
    (reject,) = [item for item in items if isinstance(item, Reject)]
    assert (reject.source_offset, reject.length) == (len(parts[0]), len(broken))


def test_a_zstd_record_that_expands_too_far_is_a_reject(otlp, monkeypatch):
    monkeypatch.setattr(units, "FREE_EXPANSION_BYTES", 1 << 20)
    monkeypatch.setattr(units, "MAX_EXPANSION", 100)
    good = otlp.zstd(otlp.to_json(otlp.record(otlp.span(1))))
    reject, frame = otlp.frames_of(otlp.framed([otlp.zstd(b" " * (9 << 20)), good]))
    assert isinstance(frame, Frame)
    assert "bomb" in reject.reason


def test_a_hostile_file_is_not_looked_at_for_ever(otlp, monkeypatch):
    looks = []
    monkeypatch.setattr(framing, "MAX_GUESSES", 50)
    monkeypatch.setattr(framing.wire, "is_traces_message", lambda *args: looks.append(args))
    likely = (40).to_bytes(4, "big") + b"\x0a\x20"
    (reject,) = otlp.frames_of(b"\x00" + likely * 20_000)
    assert reject.reason == "not OTLP traces"
    assert len(looks) <= 50


def test_limits_are_those_stated():
    assert limits.MAX_RECORD_BYTES == 64 << 20
    assert limits.MAX_SPAN_BYTES == 32 << 20
    assert limits.MAX_EXPANSION >= 1000


@pytest.mark.parametrize("how", ["gzip", "zstd"])
@pytest.mark.parametrize("rubbish", [b"", b"rubbish", "magic"])
def test_reading_goes_on_behind_a_damaged_member_or_frame(otlp, lines, how, rubbish):
    pack, magic = {
        "gzip": (gzip.compress, b"\x1f\x8b\x08\x00"),
        "zstd": (otlp.zstd, b"\x28\xb5\x2f\xfd\x20"),
    }[how]
    parts = [pack(b"".join(line + b"\n" for line in lines[n : n + 10])) for n in range(0, 40, 10)]
    middle = len(parts[1]) // 2
    for at in (0, 1, 4, 6, 12, middle, len(parts[1]) - 5):
        broken = parts[1][:at] + bytes([parts[1][at] ^ 0xFF, parts[1][at + 1] ^ 0x5A]) + parts[1][at + 2 :]
        extra = magic * 3 if rubbish == "magic" else rubbish
        items = otlp.frames_of(parts[0] + broken + extra + parts[2] + parts[3])
        found = texts_of(otlp, items)
        assert found[:10] == lines[:10]
        assert found[-19:] == lines[21:40], at  # the first behind the damage may be glued to what is before
        assert lines[20] in found or any(text.endswith(lines[20]) for text in found)
        gaps = [item.reason for item in items if isinstance(item, Reject) and "read on" in item.reason]
        assert len(gaps) == 1 or (
            at > 1 and not gaps
        )  # not every byte matters, and zstd has no checksum here
        assert all(how in reason for reason in gaps)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_cut_member_before_a_whole_one_is_not_the_end(otlp, lines, how):
    """A restarted exporter appends to a file that was cut."""
    pack = {"gzip": gzip.compress, "zstd": otlp.zstd}[how]
    first = pack(lines[0] + b"\n" + lines[1] + b"\n")
    for cut in range(len(first) - 200, len(first), 7):
        items = otlp.frames_of(first[:cut] + pack(lines[2] + b"\n" + lines[3] + b"\n"))
        found = texts_of(otlp, items)
        assert found[0] == lines[0] or how == "zstd"  # a block of zstd is had as a whole or not at all
        assert found[-1] == lines[3]
        assert found[-2].endswith(lines[2])


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_file_of_nothing_but_beginnings_is_not_looked_at_for_ever(otlp, monkeypatch, how):
    monkeypatch.setattr(compression, "MAX_GUESSES", 100)
    magic = {"gzip": b"\x1f\x8b\x08\x00", "zstd": b"\x28\xb5\x2f\xfd\x20"}[how]
    items = otlp.frames_of(magic * 200_000)
    assert len(items) <= 101


def test_members_that_each_run_on_to_the_end_are_not_read_for_ever(otlp, lines, monkeypatch):
    """A member that lost its end can go on as data through all that follow."""
    monkeypatch.setattr(compression, "MAX_REREAD_BYTES", 0)
    unit = gzip.compress(b"\n".join(lines[:4]))[:-30] + b"zz"
    packed = unit * 300
    read = []

    class Counted(io.BytesIO):
        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    list(read_frames("-", stdin=Counted(packed)))
    assert sum(read) < 12 * len(packed)


@pytest.mark.parametrize(
    ("header", "blocks", "size"),
    [
        (b"\x20\x05", b"\x29\x00\x00hello", 14),  # single segment of 5 bytes, one raw block, the last
        (
            b"\x00\x58",
            b"\x28\x00\x00hello\x03\x00\x00x",
            18,
        ),  # a window; a raw block, then an RLE block of none
        (b"\x24\x05", b"\x29\x00\x00hello\x01\x02\x03\x04", 18),  # with a checksum
        (
            b"\xe7\1\0\0\0\5\0\0\0\0\0\0\0",
            b"\x29\x00\x00hello\x01\x02\x03\x04",
            29,
        ),  # dictionary id, 8-byte size
    ],
)
def test_zstd_frames_end_where_rfc_8878_says(header, blocks, size):
    frame = zstd_frames.ZSTD_MAGIC + header + blocks
    assert len(frame) == size
    for before in (0, 7):
        data = b"x" * before + frame
        assert zstd_frames.frame_end(io.BytesIO(data), before) == len(data)
        assert zstd_frames.frame_end(io.BytesIO(data + b"more"), before) == len(data)
        for cut in range(1, size):
            assert zstd_frames.frame_end(io.BytesIO(data[:-cut]), before) == -1


def test_skippable_frames_of_zstd_hold_nothing(otlp, lines):
    skippable = b"\x53\x2a\x4d\x18" + (300).to_bytes(4, "little") + bytes(300)
    assert zstd_frames.frame_end(io.BytesIO(skippable), 0) == 308
    packed = otlp.zstd(lines[0] + b"\n") + skippable + otlp.zstd(lines[1] + b"\n")
    assert texts_of(otlp, otlp.frames_of(packed)) == lines[:2]
