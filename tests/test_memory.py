"""Small inputs, and the thread for them."""

import os

import pytest

from tracefit.memory import POLARS_THREADS, are_small, use_one_thread

LARGE_BYTES = 40 * 2**20


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two small files, one below another folder."""
    (tmp_path / "run").mkdir()
    for name in ("spans.jsonl", "run/vllm.log"):
        (tmp_path / name).write_bytes(b"x" * 1_000)
    return tmp_path


def _large(path):
    with path.open("wb") as file:
        file.truncate(LARGE_BYTES)


def test_small_files_in_folders_are_small(folder):
    assert are_small([str(folder / "spans.jsonl"), str(folder / "run")])


def test_nothing_to_read_is_small():
    assert are_small([])


def test_a_large_file_in_a_folder_is_not(folder):
    _large(folder / "run" / "large.jsonl")
    assert not are_small([str(folder)])


@pytest.mark.parametrize("given", ["s3://bucket/runs", "-", "missing.jsonl", "a" * 300])
def test_what_is_not_on_this_disk_may_be_large(given):
    assert not are_small([given])


@pytest.mark.parametrize(("set_by_user", "threads"), [(None, "1"), ("3", "3")])
def test_a_setting_of_the_user_stays(monkeypatch, set_by_user, threads):
    # Set first, so that what the test sets is taken back.
    monkeypatch.setenv(POLARS_THREADS, set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv(POLARS_THREADS)
    use_one_thread()
    assert os.environ[POLARS_THREADS] == threads
