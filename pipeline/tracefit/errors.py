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
    from collections.abc import Collection, Iterable, Iterator, Mapping


EXIT_DONE = 0
EXIT_NOTHING = 1
"""The data cannot support the result."""

EXIT_QUARANTINE = 3
"""Done, with something in quarantine: rejects, dropped events, duplicate spans or refused requests."""

_owners: Mapping[str, str] | None = None
"""Flags that the running command lacks, each with a command that has it; null in Python."""


@contextmanager
def naming_flags(*, flags: bool | Mapping[str, str] = True) -> Iterator[None]:
    """Name options by their flags in this process: for the command line and its workers.

    Args:
        flags: Whether to do so; or the flags that the running command lacks, each with a command that has it.
    """
    global _owners  # noqa: PLW0603 - a process has one user, at a terminal or in Python
    before = _owners
    set_command(flags)
    try:
        yield
    finally:
        _owners = before


def set_command(flags: bool | Mapping[str, str]) -> None:
    """Name options as in `naming_flags`, from now on: a command is known only when its line is read."""
    global _owners  # noqa: PLW0603 - as above
    _owners = ({} if flags else None) if isinstance(flags, bool) else flags


def names_flags() -> bool | Mapping[str, str]:
    """Return how options are named, for `naming_flags` in another process."""
    return False if _owners is None else _owners


def either(flag: str, parameter: str) -> str:
    """Name an option: by its parameter in Python, by its flag on the command line, with a command that has it if the
    running one lacks it.
    """
    if _owners is None:
        return parameter
    return f"{flag} of `tracefit {_owners[flag]}`" if flag in _owners else flag


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
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_SHOWN_CHARS = 200


def unexpected(error: BaseException) -> str:
    """Return what an error that nobody expected is, in a phrase: its kind and the beginning of its text."""
    return f"unexpected {type(error).__name__} ({' '.join(str(error).split())[:_SHOWN_CHARS]})"


FORMULA_SIGNS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"
"""First characters of a cell that a spreadsheet reads as a formula; some read the wide signs of East Asian fonts as the
narrow ones."""


def spreadsheet_safe(value: object) -> object:
    """Return a value for a cell of a CSV file that no spreadsheet reads as a formula."""
    # A leading quote makes it text in every spreadsheet.
    is_formula = isinstance(value, str) and value[:1] in tuple(FORMULA_SIGNS)
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
    close, closest = (difflib.get_close_matches(name[:64], names, n=most, cutoff=c) for c in (cutoff, _MISSPELT))
    close = closest or begin or close
    return f"did you mean {' or '.join(close)}?" if close else None


def known_names(name: str, known: Collection[str], *, title: str = "known", most: int = 1) -> str:
    """Return a hint that lists all names, after those closest to `name`, if any."""
    listed = f"{title}: {', '.join(known)}"
    close = did_you_mean(name, known, most=most)
    return f"{close} {listed}" if close else listed
