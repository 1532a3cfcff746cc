"""Every command in README.md and docs/ runs as it stands there, but those that say why they cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from e2e.shell import run_in_bash

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<kind>\w*)\n(?P<code>.*?)```", re.DOTALL)
COMMAND_KINDS = {"bash", "sh", "console"}


def _blocks(page):
    return [m.groupdict() for m in BLOCK.finditer(page.read_text())]


WITH_COMMANDS = [p for p in PAGES if any(b["kind"] in COMMAND_KINDS and not b["why"] for b in _blocks(p))]


def _run(page, folder):
    """Run the commands of a page one after the other, with the repository's data beside them."""
    for name in ("fixtures", "models"):
        (folder / name).symlink_to(ROOT / name)
    code = "".join(b["code"] for b in _blocks(page) if b["kind"] in COMMAND_KINDS and not b["why"])
    asked = folder / ".asked"
    asked.mkdir()
    return run_in_bash(code, folder, asked)


ROWS = {
    "comparison": r"^\| \S+ \| .+ \| [\d.]+ \| [\d.]+ \|$",
    "traces": r"^\| .+ \| (?:yes|limited) \| .+ \|$",
}
"""Page to the rows of its table that its commands print."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    # Those of README.md are run by test_readme.py, which looks at what they print.
    [p for p in WITH_COMMANDS if p.parent != ROOT],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run_and_print_its_table(page, tmp_path):
    done = _run(page, tmp_path)
    assert done.returncode == 0, done.stderr
    if page.stem in ROWS:
        shown = re.findall(ROWS[page.stem], page.read_text(), re.MULTILINE)
        assert shown
        assert shown == [line for line in done.stdout.splitlines() if line.startswith("| ")]


def test_the_pages_with_such_a_table_are_there():
    assert ROWS.keys() <= {page.stem for page in WITH_COMMANDS}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_in_blocks_that_are_run(page):
    """A block without a language, or in another, holds no command of ours."""
    for block in _blocks(page):
        if block["kind"] not in COMMAND_KINDS:
            assert not re.search(r"^\$? ?(tracefit|vllm|make) ", block["code"], re.MULTILINE) or block["kind"] == "text"


def test_pages_write_into_folders_of_their_own():
    """A reader who follows two pages would otherwise train the second on the runs of the first."""
    of_page = {
        page: {
            folder.split("/")[0]
            for block in _blocks(page)
            if block["kind"] in COMMAND_KINDS
            for folder in re.findall(r"--out (\S+)", block["code"] if not block["why"] else "")
        }
        for page in WITH_COMMANDS
    }
    written = [folder for folders in of_page.values() for folder in folders]
    writers = [page.name for page, folders in of_page.items() if "out" in folders]
    assert writers == ["README.md"], "`make run` writes there too"
    assert len(written) > 8
    assert len(written) == len(set(written))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page):
    prose = BLOCK.sub("", page.read_text())
    site = ROOT / "docs" if ROOT / "docs" in page.parents else ROOT  # the site has only its own pages
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", prose):
        file = (page.parent / target).resolve()
        assert file.exists(), target
        assert file.is_relative_to(site), target


def test_the_site_lists_pages_that_are_there():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert len(listed) > 10
    assert all((ROOT / "docs" / page).exists() for page in listed)


@pytest.mark.parametrize("reader", ["polars", "pandas", "duckdb"])
def test_the_page_on_tables_reads_what_run_wrote(trained, tmp_path, monkeypatch, reader):
    """The snippets as they stand there; those of libraries that are not installed are left out."""
    library = pytest.importorskip(reader)
    (tmp_path / "reading").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    blocks = _blocks(ROOT / "docs" / "how-to" / "read-tables.md")
    sql = [b["code"] for b in blocks if b["kind"] == "sql"]
    python = [b["code"] for b in blocks if b["kind"] == "python" and ("pandas" in b["code"]) == (reader == "pandas")]
    if reader == "duckdb":
        (row,) = library.sql(sql[0]).fetchall()
        assert row[:2] == ("busy", 90)
        return
    names: dict[str, Any] = {}
    for code in python:
        exec(code, names)  # noqa: S102
    assert len(names["requests"]) == 90
    assert set(names["requests"]["run_id"]) == {"busy"}
    if reader == "polars":
        assert 0 < len(names["held"]) < len(names["steps"])
