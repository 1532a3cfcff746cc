from itertools import chain

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.tables.external_sort import SortSpace

KEYS = st.integers(0, 6) | st.none()
FRAMES = st.lists(st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=12), max_size=6)
SCHEMA = {"key": pl.Int64, "time": pl.Int64}


def sorted_rows(rows):
    return sorted(rows, key=lambda row: (row[0] is None, row[0] or 0, row[1]))


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("held_bytes", [0, 100, 1 << 20])
@given(frames=FRAMES)
def test_windows_are_in_order_and_keep_keys_together(held_bytes, has_thread, frames, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    with SortSpace(folder, held_bytes, window_bytes=32, block_rows=3, has_thread=has_thread) as space:
        rows = space.sort(key=("key",), order=("key", "time"))
        for frame in frames:
            rows.add(pl.DataFrame(frame, SCHEMA, orient="row"))
        windows = [window.rows() for window in rows.windows()]
    assert [row for window in windows for row in window] == sorted_rows(chain.from_iterable(frames))
    keys = [{key for key, _ in window} for window in windows]
    assert sum(map(len, keys)) == len(set().union(*keys))
    assert all(windows)


@pytest.mark.parametrize("has_thread", [False, True])
def test_rows_may_be_sorted_again_while_they_are_read(has_thread, tmp_path):
    with SortSpace(tmp_path, 100, window_bytes=32, block_rows=3, has_thread=has_thread) as space:
        first, second = (space.sort(key=("key",), order=("key", "time")) for _ in range(2))
        first.add(pl.DataFrame({"key": range(100), "time": [0] * 100}))
        for window in first.windows():
            second.add(window.select(-pl.col("key"), "time"))
        keys = pl.concat(second.windows())["key"].to_list()
    assert keys == list(range(-99, 1))


def _windows_of(rows, frame):
    rows.add(frame)
    yield from rows.windows()


@pytest.mark.parametrize("has_thread", [False, True])
def test_scratch_folder_that_is_missing_is_an_error(has_thread, tmp_path):
    with SortSpace(tmp_path / "missing", 0, has_thread=has_thread) as space:
        rows = space.sort(key=("key",), order=("key", "time"))
        with pytest.raises(OSError, match="No such file"):
            list(_windows_of(rows, pl.DataFrame({"key": [1], "time": [0]})))


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
