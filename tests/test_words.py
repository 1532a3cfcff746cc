"""Sentences that readers stumble over: docstrings, comments, messages and pages hold none of these shapes."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

START = r"(?:\A|(?<=[.!?:]\s)|(?<=\n\n))\s*"
"""Where a sentence or a paragraph begins."""

FORBIDDEN = {
    "none as a predicate; say what it is instead": re.compile(r"\b(?:is|are|was|were) none\b"),
    "'of which'; say whose, or two sentences": re.compile(r"\bof which\b", re.IGNORECASE),
    "'but for'; say except": re.compile(r"\bbut for\b", re.IGNORECASE),
    "'anew'; say again, or re-": re.compile(r"\banew\b", re.IGNORECASE),
    "'told'; say distinguished, reported or given": re.compile(r"\btold\b", re.IGNORECASE),
    "a sentence that begins with 'Of a'; begin with its subject": re.compile(START + r"Of (?:a|an|the)\b"),
    "a sentence whose subject is 'What …'; name the thing": re.compile(START + r"What\b(?![^.?!]*\?)"),
}


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs with their line, without code; a heading is no sentence."""
    kept = re.sub(r"^(```+)[\s\S]*?^\1", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE)
    kept = re.sub(r"^#.*$", "", kept, flags=re.MULTILINE)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", kept):
        yield line, paragraph
        line += paragraph.count("\n")


def python(text: str) -> Iterator[tuple[int, str]]:
    """Yield strings, and blocks of comments, with their line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    block, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] > last + 1:
                yield last - len(block) + 1, "\n".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield last - len(block) + 1, "\n".join(block)


def stumbles(text: str, passages: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of each forbidden shape in passages."""
    for line, passage in passages:
        for rule, shape in FORBIDDEN.items():
            for match in shape.finditer(passage):
                yield line + passage.count("\n", 0, match.end()), f"{match[0].strip()!r}: {rule}"


FILES = sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
