"""Compressed content: whole, cut, corrupt and hostile. Only the compression libraries compute the expected content."""

from __future__ import annotations

import gzip
import io
import os
import random
import sys
import threading

import pytest

from containers import framed
from tracefit.inputs.compression import USUAL, Expansion, Gap, compression_of, pieces

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK = {"gzip": gzip.compress, "zstd": zstd.compress}
RNG = random.Random(0)
LINES = [b'{"resourceSpans":[{"schemaUrl":"%b"}]}' % RNG.randbytes(450).hex().encode() for _ in range(120)]


def lines(start, stop):
    return b"".join(line + b"\n" for line in LINES[start:stop])


def read(data, bounds=USUAL):
    """Return the content of a file and the reasons of its gaps."""
    items = list(pieces(io.BytesIO(data), bounds))
    parts = [item.data for item in items if not isinstance(item, Gap)]
    assert all(len(part) <= bounds.chunk_bytes for part in parts)
    content = b"".join(parts)
    return content, [item.reason for item in items if isinstance(item, Gap)]


def records(count, start=0):
    return framed([zstd.compress(line) for line in LINES[start : start + count]])


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_cut_unit_gives_all_that_can_be_decompressed(how):
    packed = PACK[how](lines(0, 120))
    for share in (0.1, 0.35, 0.7, 0.99):
        cut = packed[: int(len(packed) * share)]
        content, gaps = read(cut)
        assert lines(0, 120).startswith(content)
        assert gaps == [f"{how} data is cut"]
        if how == "zstd":
            assert content == zstd.ZstdDecompressor().decompress(cut)


def test_a_member_that_lost_only_its_checksum_keeps_all_it_holds():
    assert read(gzip.compress(lines(0, 2))[:-3]) == (lines(0, 2), ["gzip data is cut"])


def test_a_corrupt_byte_keeps_what_comes_before():
    packed = bytearray(gzip.compress(lines(0, 120)))
    middle = len(packed) // 2
    packed[middle : middle + 2] = bytes(byte ^ 0xFF for byte in packed[middle : middle + 2])
    content, gaps = read(bytes(packed))
    assert content.startswith(lines(0, 50))
    assert gaps == ["gzip data is corrupt"]


@pytest.mark.parametrize("how", ["gzip", "zstd"])
@pytest.mark.parametrize("junk", [b"", b"rubbish", b"\x1f\x8b\x08\x00" * 3, b"\x28\xb5\x2f\xfd\x20" * 3])
def test_reading_goes_on_behind_a_damaged_unit(how, junk):
    parts = [PACK[how](lines(n, n + 10)) for n in range(0, 40, 10)]
    for at in (0, 1, 4, 6, 12, len(parts[1]) // 2, len(parts[1]) - 5):
        broken = parts[1][:at] + bytes([parts[1][at] ^ 0xFF, parts[1][at + 1] ^ 0x5A]) + parts[1][at + 2 :]
        content, gaps = read(parts[0] + broken + junk + parts[2] + parts[3])
        assert content.startswith(lines(0, 10))
        assert content.endswith(lines(20, 40)), at
        # Not every byte matters, and these zstd frames have no checksum.
        assert all("read on at the next" in gap for gap in gaps)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_cut_unit_before_a_whole_one_is_not_the_end(how):
    """A restarted exporter appends to a file that was cut."""
    first = PACK[how](lines(0, 2))
    for cut in range(len(first) - 200, len(first), 7):
        for behind in (PACK[how](lines(2, 4)), lines(2, 4)):
            content, gaps = read(first[:cut] + behind)
            assert content.endswith(lines(2, 4))
            assert len(gaps) == 1


def test_zeros_behind_a_gzip_member_are_padding():
    packed = gzip.compress(lines(0, 1)) + bytes(70_000) + gzip.compress(lines(1, 2)) + bytes(9)
    assert read(packed) == (lines(0, 2), [])


def test_skippable_frames_of_zstd_hold_nothing():
    skippable = b"\x53\x2a\x4d\x18" + (300).to_bytes(4, "little") + bytes(300)
    packed = skippable + zstd.compress(lines(0, 1)) + skippable + zstd.compress(lines(1, 2))
    assert read(packed) == (lines(0, 2), [])


def test_formats_may_change_inside_a_file():
    parts = [
        lines(0, 4),
        gzip.compress(lines(4, 8)),
        zstd.compress(lines(8, 12)),
        records(4, 12),
        lines(16, 20),
    ]
    assert read(b"".join(parts)) == (lines(0, 20), [])
    assert read(gzip.compress(lines(0, 4)) + lines(4, 8) + gzip.compress(lines(8, 9))) == (lines(0, 9), [])


def test_a_magic_at_the_edge_of_a_chunk_is_found():
    for size in range(4090, 4099):
        plain = b'{"resourceSpans":[]}' + b" " * (size - 21) + b"\n"
        found = read(plain + gzip.compress(lines(0, 1)), Expansion(chunk_bytes=4096))
        assert found == (plain + lines(0, 1), [])


@pytest.mark.parametrize("how", ["gzip", "zstd", "framed zstd"])
def test_junk_before_the_first_unit_does_not_hide_it(how):
    packed = records(9) if how == "framed zstd" else PACK[how](lines(0, 9))
    content, gaps = read(b"\xff\x00junk" * 30 + packed)
    assert content == lines(0, 9)
    assert len(gaps) == 1


def test_compressed_bytes_inside_protobuf_are_left_alone(otlp):
    message = otlp.framed([otlp.message(), otlp.message(2, name="x" * 90)])
    hidden = message + otlp.framed([b"\x0a\x7f" + gzip.compress(lines(0, 9))])
    assert read(hidden) == (hidden, [])


def test_length_prefixed_zstd_holds_json_or_protobuf(otlp):
    assert read(records(20)) == (lines(0, 20), [])
    broken_lines = framed([zstd.compress(b'{\n"resourceSpans":[]\n}\n')])
    assert read(broken_lines)[0] == b'{ "resourceSpans":[] } \n'
    messages = otlp.messages(5)
    assert read(framed(map(zstd.compress, messages))) == (framed(messages), [])


def test_a_corrupt_record_of_length_prefixed_zstd_costs_itself():
    parts = [records(1, n) for n in range(3)]
    broken = parts[1][:12] + b"\xff\xff\xff\xff" + parts[1][16:]
    content, gaps = read(parts[0] + broken + parts[2])
    assert content == lines(0, 1) + lines(2, 3)
    assert len(gaps) == 1


@pytest.mark.parametrize("size", [0, 1, 77, 2**31, 2**32 - 1])
def test_a_length_before_zstd_that_lies_costs_nothing(size):
    lying = size.to_bytes(4, "big") + records(1, 1)[4:]
    assert read(records(1) + lying + records(1, 2)) == (lines(0, 3), [])


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("bad", [b"\0\0\0\4\x28\xb5\x2f\xfd", b"\0\0\0\7\x28\xb5\x2f\xfd\x08xx"])
def test_frames_of_nothing_by_the_million_are_one_counted_gap(bad):
    items = list(pieces(io.BytesIO(records(1) + bad * 1_000_000 + records(1, 1))))
    assert [item.data for item in items if not isinstance(item, Gap)] == [lines(0, 1), lines(1, 2)]
    (gap,) = [item for item in items if isinstance(item, Gap)]
    assert gap.count == 1_000_000


@pytest.mark.slow
def test_tiny_records_cost_as_much_as_there_are(grows_linearly):
    tiny = framed([zstd.compress(b"{}")])

    def prepare(n):
        content = tiny * n + records(1)
        return lambda: read(content)

    assert read(tiny * 5_000 + records(1)) == (b"{}\n" * 5_000 + lines(0, 1), [])
    grows_linearly(prepare, 500)


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress, lambda data: framed([zstd.compress(data)])])
def test_a_decompression_bomb_is_stopped(pack):
    bounds = Expansion(free_bytes=1 << 20, max_ratio=100)
    content, gaps = read(pack(b"{" + b" " * (40 << 20)), bounds)
    assert len(content) < 10 << 20
    assert gaps == ["decompression bomb: more than 100 bytes for each compressed byte"]


def test_a_record_that_is_too_large_is_a_gap():
    large = framed([zstd.compress(RNG.randbytes(50_000).hex().encode() * 12)])
    content, gaps = read(records(1) + large + records(1, 1), Expansion(max_record_bytes=1 << 20))
    assert content == lines(0, 2)
    assert gaps == ["record too large: more than 1 MiB"]


def test_a_window_of_gibibytes_is_not_allocated():
    window_of_2_gib = b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00"
    content, gaps = read(window_of_2_gib + zstd.compress(lines(0, 2)))
    assert content == lines(0, 2)
    assert len(gaps) == 1


def test_traces_that_compress_well_are_no_bomb():
    content = lines(0, 1) * 2000
    assert read(gzip.compress(content), Expansion(free_bytes=0)) == (content, [])


@pytest.mark.slow
@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd\x20", b"{\x1f\x8b\x08\x00"])
def test_file_of_record_starts_takes_linear_time(grows_linearly, magic):
    def prepare(n):
        content = magic * n
        return lambda: read(content)

    grows_linearly(prepare, 5_000)


def test_units_that_each_run_on_to_the_end_are_not_read_for_ever():
    """A member that lost its end can go on as data through all that follow."""

    class Counted(io.BytesIO):
        bytes_read = 0

        def read(self, size=-1):
            data = super().read(size)
            self.bytes_read += len(data)
            return data

    packed = (gzip.compress(lines(0, 4))[:-30] + b"zz") * 3000
    raw = Counted(packed)
    for _ in pieces(raw):
        pass
    assert raw.bytes_read < 64 << 20


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
def test_what_cannot_be_rewound_is_read_too(how):
    data = PACK.get(how, bytes)(lines(0, 20))
    read_end, write_end = os.pipe()

    def write():
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            for index in range(0, len(data), 7):
                pipe.write(data[index : index + 7])

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(read_end, "rb") as pipe:
        assert b"".join(piece.data for piece in pieces(pipe)) == lines(0, 20)
    writer.join()


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x28\xb5\x2f\xfd\x20", "zstd"),
        (b"\x53\x2a\x4d\x18", "zstd"),
        (b"\0\0\0\x09\x28\xb5\x2f\xfd", "framed zstd"),
        (b'{"resour', None),
        (b"", None),
    ],
)
def test_how_a_file_begins_says_how_it_is_compressed(head, kind):
    assert compression_of(head) == kind
