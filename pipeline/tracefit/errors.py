"""Errors: each is one line with the fault, its position and advice.

Exit codes of the command line: 0 done, 1 the data cannot support the result, 2 usage,
3 done with something in quarantine (a result, not an error, so it has no class here); 4 an unexpected error.
"""

from __future__ import annotations

import difflib
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator


EXIT_DONE = 0
EXIT_NOTHING = 1
"""The data cannot support the result."""

EXIT_QUARANTINE = 3
"""Done, with something in quarantine: rejects, dropped events, duplicate spans or refused requests."""

_names_flags = False


@contextmanager
def naming_flags(*, flags: bool = True) -> Iterator[None]:
    """Name options by their flags in this process: for the command line and its workers."""
    global _names_flags  # noqa: PLW0603 - a process has one user, at a terminal or in Python
    before, _names_flags = _names_flags, flags
    try:
        yield
    finally:
        _names_flags = before


def names_flags() -> bool:
    """Return whether options are named by their flags, not as parameters."""
    return _names_flags


def either(flag: str, parameter: str) -> str:
    """Name an option: by its flag on the command line, by its parameter in Python."""
    return flag if _names_flags else parameter


class TracefitError(Exception):
    """Base of every error tracefit raises on purpose.

    Args:
        what: The fault, in a phrase that starts in lower case.
        where: File, offset, key or option at fault.
        hint: Advice for the user.
    """

    exit_code: ClassVar[int] = EXIT_NOTHING

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = without_credentials(what)
        self.where, self.hint = (text and without_credentials(text) for text in (where, hint))
        super().__init__(self.what)

    def __str__(self) -> str:
        """Return the whole error as one line."""
        return self.line()

    def line(self) -> str:
        """Return the whole error as one line."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return printable(" ".join(f"{text}; {self.hint}".split() if self.hint else text.split()))


class DataError(TracefitError):
    """The data cannot support the requested result."""


class UsageError(TracefitError):
    """The command, an option or a file named by the user is wrong."""

    exit_code = 2


_CREDENTIALS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{1,20}:/+)(?:[^\s/?:]*:\S*|[^\s/?]*)@")
"""The credentials before the host of a URL. A secret key may contain slashes, although they should be written
as %2F."""


def without_credentials(text: str) -> str:
    """Return text without the credentials of its URLs."""
    return _CREDENTIALS.sub(r"\1", text)


def printable(text: str) -> str:
    """Escape control codes: file names can hold codes that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_SHOWN_CHARS = 200


def unexpected(error: BaseException) -> str:
    """Return what an error that nobody expected is, in a phrase: its kind and the beginning of its text."""
    return f"unexpected {type(error).__name__} ({' '.join(str(error).split())[:_SHOWN_CHARS]})"


def spreadsheet_safe(value: object) -> object:
    """Return a value for a cell of a CSV file that no spreadsheet reads as a formula."""
    # A leading quote makes it text in every spreadsheet.
    is_formula = isinstance(value, str) and value[:1] in tuple("=+-@\t\r")
    return f"'{value}" if is_formula else value


_MANY_CHARS = 4
"""Characters at the beginning of a name that are not so by chance."""
_MOST_SUGGESTED = 3
_MISSPELT = 0.85
"""Similarity of a name with one letter wrong, which is closer than a name that begins alike."""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6, most: int = 1) -> str | None:
    """Return a question that suggests the closest names, or those that begin like a name that is not just misspelt.

    Null if no name begins like it or has a similarity of `cutoff` (0 to 1).
    """
    names = list(known)
    begin = [n for n in names if len(name) >= _MANY_CHARS and n.startswith(name)][:_MOST_SUGGESTED]
    # The search takes time in proportion to the length of the name, which may be a whole file by mistake.
    close, closest = (
        difflib.get_close_matches(name[:64], names, n=most, cutoff=c) for c in (cutoff, _MISSPELT)
    )
    close = closest or begin or close
    return f"did you mean {' or '.join(close)}?" if close else None


def known_names(name: str, known: Collection[str], *, title: str = "known", most: int = 1) -> str:
    """Return a hint that lists all names, after those closest to `name`, if any."""
    listed = f"{title}: {', '.join(known)}"
    close = did_you_mean(name, known, most=most)
    return f"{close} {listed}" if close else listed
