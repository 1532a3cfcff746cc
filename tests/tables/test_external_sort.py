import pickle
from itertools import chain

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.tables.external_sort import SortSpace

KEYS = st.integers(0, 6) | st.none()
FRAMES = st.lists(st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=12), max_size=6)
SCHEMA = {"key": pl.Int64, "time": pl.Int64}


def sort_in(folder, held_bytes):
    space = SortSpace(folder, held_bytes, window_bytes=32, block_rows=3)
    return space.sort(key=("key",), order=("key", "time"))


def sorted_rows(rows):
    return sorted(rows, key=lambda row: (row[0] is None, row[0] or 0, row[1]))


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("held_bytes", [0, 100, 1 << 20])
@given(frames=FRAMES)
def test_windows_are_in_order_and_keep_keys_together(held_bytes, frames, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    rows = sort_in(folder, held_bytes)
    for frame in frames:
        rows.add(pl.DataFrame(frame, SCHEMA, orient="row"))
    windows = [window.rows() for window in rows.windows()]
    assert [row for window in windows for row in window] == sorted_rows(chain.from_iterable(frames))
    keys = [{key for key, _ in window} for window in windows]
    assert sum(map(len, keys)) == len(set().union(*keys))
    assert all(windows)


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
@given(frames=FRAMES)
def test_several_sorts_go_on_as_one(on_disk, frames, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    rows = sort_in(folder, 100)
    for frame in frames:
        some = sort_in(folder, 100)
        some.add(pl.DataFrame(frame, SCHEMA, orient="row"))
        contents = pickle.loads(pickle.dumps(some.take(on_disk=on_disk)))  # noqa: S301 - as to another process
        assert not (on_disk and contents.frames)
        assert (contents.rows, some.rows) == (len(frame), 0)
        rows.add_all(contents)
    assert rows.rows == sum(map(len, frames))
    windows = [window.rows() for window in rows.windows()]
    assert list(chain.from_iterable(windows)) == sorted_rows(chain.from_iterable(frames))
    assert not rows.rows


def test_more_files_are_read_than_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("tracefit.tables.external_sort._MOST_OPEN", 2)
    rows = sort_in(tmp_path, 0)
    for number in range(5):
        rows.add(pl.DataFrame({"key": range(number, 100, 5), "time": [0] * 20}))
    assert len(list(tmp_path.iterdir())) == 5
    assert pl.concat(rows.windows())["key"].to_list() == list(range(100))


def test_rows_may_be_sorted_again_while_they_are_read(tmp_path):
    space = SortSpace(tmp_path, 100, window_bytes=32, block_rows=3)
    first, second = (space.sort(key=("key",), order=("key", "time")) for _ in range(2))
    first.add(pl.DataFrame({"key": range(100), "time": [0] * 100}))
    for window in first.windows():
        second.add(window.select(-pl.col("key"), "time"))
    keys = pl.concat(second.windows())["key"].to_list()
    assert keys == list(range(-99, 1))


def test_scratch_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        sort_in(tmp_path / "missing", 0).add(pl.DataFrame({"key": [1], "time": [0]}))


def test_a_window_is_no_larger_than_asked_for_where_keys_allow(tmp_path):
    rows = SortSpace(tmp_path, window_bytes=1600).sort(key=("key",), order=("key", "time"))
    rows.add(pl.DataFrame({"key": range(1000), "time": [0] * 1000}))  # sixteen bytes each
    assert {window.height for window in rows.windows()} <= {*range(80, 101)}


def test_sorts_share_their_memory_and_the_largest_makes_room(tmp_path):
    space = SortSpace(tmp_path, most_held_bytes=2000)
    small, large = (space.sort(key=("key",), order=("key", "time")) for _ in range(2))
    hundred = pl.DataFrame({"key": range(100), "time": [0] * 100})
    small.add(hundred.head(40))
    large.add(hundred.head(80))
    assert not list(tmp_path.iterdir())
    large.add(hundred.head(10))
    assert (small.held_bytes, large.held_bytes) == (640, 0)
    assert len(list(tmp_path.iterdir())) == 1
    assert [sum(window.height for window in rows.windows()) for rows in (small, large)] == [40, 90]
