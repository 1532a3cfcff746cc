"""Threads by the size of the input."""

import os

import pytest

from tracefit.memory import POLARS_THREADS, use_one_thread_if_small

LARGE_BYTES = 40 * 2**20


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch):
    # Set first, so that what the test sets is taken back.
    monkeypatch.setenv(POLARS_THREADS, "")
    monkeypatch.delenv(POLARS_THREADS)


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


def test_small_files_have_one_thread(folder):
    use_one_thread_if_small([str(folder / "spans.jsonl"), str(folder / "run")])
    assert os.environ[POLARS_THREADS] == "1"


def test_nothing_to_read_is_small():
    use_one_thread_if_small([])
    assert os.environ[POLARS_THREADS] == "1"


def test_a_large_file_in_a_folder_has_all(folder):
    _large(folder / "run" / "large.jsonl")
    use_one_thread_if_small([str(folder)])
    assert POLARS_THREADS not in os.environ


@pytest.mark.parametrize("given", ["s3://bucket/runs", "-", "missing.jsonl", "a" * 300])
def test_what_is_not_on_this_disk_may_be_large(given):
    use_one_thread_if_small([given])
    assert POLARS_THREADS not in os.environ


def test_a_setting_of_the_user_stays(monkeypatch, folder):
    monkeypatch.setenv(POLARS_THREADS, "3")
    use_one_thread_if_small([str(folder)])
    assert os.environ[POLARS_THREADS] == "3"
