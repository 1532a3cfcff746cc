"""Docstrings, comments, messages and pages avoid the sentence shapes of `words.toml`; a linter of prose reads no
strings of code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
START = r"(?:\A|(?<=[.!?:]\s)|(?<=\n\n))\s*"
"""The beginning of a sentence or a paragraph."""

RULES = tomllib.loads(Path(__file__).with_name("words.toml").read_text())["rule"]
SHAPES = {rule["say"]: re.compile(rule["shape"].replace("START ", START)) for rule in RULES}

PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "fixtures/**/*.md", "pipeline/*/*.md") for path in ROOT.glob(pattern)
)


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield strings and blocks of comments, or paragraphs of a page without its code, with their first line."""
    text = path.read_text()
    if path.suffix == ".md":
        prose = re.sub(r"^(```+)[\s\S]*?^\1|^#.*$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE)
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", prose):
            yield line, paragraph
            line += paragraph.count("\n")
        return
    yield from _strings_and_comments(text)


LITERAL = re.compile(
    r"""#(?P<comment>.*)|(?P<quote>\"{3}|'{3}|["'])(?P<string>(?:[^\\"'\n]|\\[\s\S]|(?!(?P=quote))["'\n])*)(?P=quote)"""
)
"""A comment or a string. The parser and the tokenizer of Python would take ten times as long for the whole tree."""


def _strings_and_comments(code: str) -> Iterator[tuple[int, str]]:
    """Yield strings, with those that follow one another as one, and comments on lines that follow one another as
    one."""
    kind, passage, first, line, end = "", "", 1, 1, 0
    for found in LITERAL.finditer(code):
        between = code[end : found.start()]
        line += code.count("\n", end, found.start())
        if found["comment"] is not None:
            now, text = "comment", found["comment"].lstrip("# ")
            follows = between.isspace() and between.count("\n") == 1
        else:
            now, text = "string", _content(found["string"], re.search("[a-z]*$", between[-2:].lower())[0])
            follows = not between.strip(" \t\nfFrRbB")
        if follows and now == kind:
            passage += "\n" * (now == "comment") + text
        else:
            yield from _parts(first, passage, kind)
            kind, passage, first = now, text, line
        line += code.count("\n", found.start(), found.end())
        end = found.end()
    yield from _parts(first, passage, kind)


def _content(string: str, prefix: str) -> str:
    """Return what a string holds, with a NUL where a value is put in."""
    if "r" not in prefix:
        string = re.sub(r"\\(n|.)", lambda escape: "\n" if escape[1] == "n" else escape[1], string)
    return re.sub(r"\{[^{}]*\}", "\0", string) if "f" in prefix else string


def _parts(line: int, passage: str, kind: str) -> Iterator[tuple[int, str]]:
    for part in passage.split("\0"):
        # A string of a single word is a name.
        if kind == "comment" or " " in part:
            yield line, part
        line += part.count("\n")


def faults(path: Path) -> Iterator[str]:
    for line, text in passages(path):
        for rule, shape in SHAPES.items():
            for match in shape.finditer(text):
                at = line + text.count("\n", 0, match.end())
                yield f"{path.relative_to(ROOT)}:{at}: {match[0].strip()!r} ; say {rule}"


CODE = [p for folder in ("pipeline", "tests") for p in sorted(ROOT.glob(f"{folder}/**/*.py")) if p != Path(__file__)]
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_sentences_are_plain(part):
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"} <= {path.name for path in PAGES}
    assert not [fault for path in [*CODE, *PAGES][part::PARTS] for fault in faults(path)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["say"])
def test_a_rule_finds_its_shape_and_nothing_else(rule):
    shape = SHAPES[rule["say"]]
    assert [text for text in rule["found"] if not shape.search(text)] == []
    assert [text for text in rule.get("fine", ()) if shape.search(text)] == []


@pytest.fixture
def faults_in(tmp_path, monkeypatch):
    """Return a function that lists the faults of a text in a file of a name."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)

    def of(name, text):
        (tmp_path / name).write_text(text)
        return [*faults(tmp_path / name)]

    return of


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Bytes that are none."""'),
        ("a.py", 'message = f"{run}: files of which one is read"'),
        ("a.py", "# A frame.\n# Of a head the end is kept."),
        ("a.md", "It shows steps alone.\n"),
    ],
)
def test_strings_comments_and_pages_are_read(faults_in, name, text):
    assert len(faults_in(name, text)) == 1


@pytest.mark.parametrize(("name", "text"), [("a.py", 'folder = "alone"'), ("a.md", "```text\nNo run is none.\n```\n")])
def test_names_and_code_of_a_page_are_not_prose(faults_in, name, text):
    assert faults_in(name, text) == []


def test_names_of_tests_are_short():
    code = (path.read_text() for path in ROOT.glob("tests/**/*.py"))
    assert [name for text in code for name in re.findall(r"def (test_\w+)", text) if len(name) > 80] == []


SPANS_ROOMS = ("inputs", "otlp", "receive", "recordings", "synth", "tables")
"""Rooms that read or write spans, whose instrumentation scopes they name."""

SPANS_LINE = re.compile(
    r"instrumentation scope|of other scopes|[Oo]ther scopes?|other_scopes|services and scopes|vLLM scopes|scopes that are not read"
    r"|ScopeSpans|_scopes\(|READ_SCOPES|\"scope|scopes? [=:]|scope: str|for scope|\{scope\}|if scopes|dialect_of\(scope|<th scope"
)


def test_scope_is_a_word_of_opentelemetry():
    """A model on a GPU under settings is a deployment."""
    package = ROOT / "pipeline" / "tracefit"
    code = [p for p in package.rglob("*") if p.suffix in (".py", ".html", ".md")]
    code = [p for p in code if p.relative_to(package).parts[0] not in SPANS_ROOMS]
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*code, *ROOT.glob("docs/**/*.md"), ROOT / "README.md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search("scope", line, re.IGNORECASE) and not SPANS_LINE.search(line)
    ]
    assert lines == []
