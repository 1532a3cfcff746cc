"""Errors of the disk are one line that says what to do."""

from __future__ import annotations

import pytest

from tracefit import UsageError
from tracefit.tables.disk import disk_errors, write_files
from tracefit.tables.store import TableStore


@pytest.mark.parametrize("text", ["[Errno 28] no", "No space left on device (os error 28)"])
def test_a_full_disk_is_known_from_the_text_of_a_library(tmp_path, text):
    with pytest.raises(UsageError) as caught, disk_errors(tmp_path):
        raise OSError(text)
    assert caught.value.line() == (
        f"{tmp_path}: cannot be written (No space left on device); the previous files are unchanged; free some space "
        "and run the command again"
    )


def _file(path):
    path.write_text("x")


def _link_to_nothing(path):
    path.symlink_to(path.parent / "nowhere")


def _link_to_itself(path):
    path.symlink_to(path)


@pytest.mark.parametrize("make", [_file, _link_to_nothing, _link_to_itself])
@pytest.mark.parametrize("below", ["", "models"])
def test_what_is_no_folder_is_named_as_such(tmp_path, make, below):
    out = tmp_path / "out"
    make(out)
    for write, where in (
        (lambda: write_files({out / below / "alpha.json": "{}"}), out / below / "alpha.json"),
        (lambda: TableStore(out / below).write_runs([]), out / below),
    ):
        # A link to nothing is a name for the folder that is made below it.
        if make is _link_to_nothing and below:
            continue
        with pytest.raises(UsageError) as caught:
            write()
        assert caught.value.line() == (
            f"{where}: cannot be written (a file or a link to nothing stands where a folder is needed); "
            "choose another folder"
        )


def test_what_a_killed_writer_left_is_removed(tmp_path):
    for left in (tmp_path / ".writing-a", tmp_path / "models" / ".writing-b"):
        left.mkdir(parents=True)
        (left / "alpha.json").write_text("half")
    write_files({tmp_path / "models" / "alpha.json": "{}", tmp_path / "report.md": "text"})
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert files == {"models", "models/alpha.json", "report.md"}
