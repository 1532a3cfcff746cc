"""Read server settings where the field leaves them: run descriptions, command lines, the server's own log."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.server.documents import (
    as_text,
    excerpt,
    kind_of,
    parse_json_object,
    parse_yaml_object,
    read_bytes,
)
from tracefit.server.settings import FLAGS, SETTINGS, TEXTS, ServerSettings, canonical_name, settings_from

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.server.documents import Document

_MAX_BYTES = 1024 * 1024
_MAX_LOG_BYTES = 64 * 1024 * 1024
_MAX_COMMAND_CHARS = 64 * 1024
_NESTED = frozenset({"vllm", "server", "args", "engine_args", "vllm_args"})
_MAX_NESTED = 4
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})([kmgKMG]?)", re.ASCII)
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_IMAGE = "vllm/vllm-openai"
# The server's switches that take no value; of those it does not list, a word after the switch is its value.
_SWITCHES = FLAGS | {
    "trust_remote_code",
    "disable_log_requests",
    "disable_log_stats",
    "enable_journey_tracing",
}
_LOGGED_DICT = re.compile(r"non-default args:\s*(\{.*\})")
_LOGGED_NAMESPACE = re.compile(r"\bargs: Namespace\((.*)\)")
_LITERAL = r"(-?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?|True|False|None|'[^'\\]*'|\"[^\"\\]*\")"
_DICT_ITEM = re.compile(rf"'(\w+)':\s*{_LITERAL}\s*(?=[,}}])")
_NAMESPACE_ITEM = re.compile(rf"\b(\w+)={_LITERAL}\s*(?=,|$)")


def read_settings(path: Path) -> ServerSettings:
    """Read settings from a file, by what it is.

    `.yaml`, `.yml` and `.json` are run descriptions; any other file is searched for the line in which vLLM
    logs its arguments, then for a `vllm serve` command line.

    Raises:
        UsageError: The file cannot be read, or holds no settings or wrong ones.
    """
    where = str(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        document = parse_json_object(read_bytes(path, limit_bytes=_MAX_BYTES), where=where)
        return _from_document(document, where=where)
    if suffix in {".yaml", ".yml"}:
        return parse_settings_yaml(read_bytes(path, limit_bytes=_MAX_BYTES), where=where)
    # A log can hold stray bytes of whatever the server printed; they do not make its arguments unreadable.
    text = read_bytes(path, limit_bytes=_MAX_LOG_BYTES).decode("utf-8", errors="replace")
    logged = _find_logged(text)
    if logged is not None:
        return settings_from(logged, where=where, source="read")
    return parse_serve_command(text, where=where)


def parse_settings_yaml(content: bytes | str, *, where: str) -> ServerSettings:
    """Read a run description: `exp-config.yaml`, `run.yaml`, or a vLLM `--config` file.

    Keys are vLLM's option names or the shorter ones of run descriptions, with dashes or underscores, at the top
    or under `vllm:`, `server:` or `args:`; `args` may also be a list or a line of options.

    Args:
        content: YAML, at most 1 MiB, without aliases.
        where: Name of the source, for errors.

    Raises:
        UsageError: Not such a file, or a value that its setting cannot have.
    """
    text = as_text(content, where=where, limit_bytes=_MAX_BYTES)
    return _from_document(parse_yaml_object(text, where=where), where=where)


def _from_document(document: Document, *, where: str) -> ServerSettings:
    values: dict[str, object] = {}
    _flatten(document, values, where=where, depth=0)
    return settings_from(values, where=where, source="read")


def _flatten(part: Document, values: dict[str, object], *, where: str, depth: int) -> None:
    """Gather settings of a mapping and of the nested mappings that are there to group them."""
    for key, value in part.items():
        name = canonical_name(str(key))
        if name in _NESTED and isinstance(value, Mapping) and depth < _MAX_NESTED:
            _flatten(value, values, where=where, depth=depth + 1)
        elif name in _NESTED and isinstance(value, list):
            words = [str(item) for item in value]
            _add(values, _options(words, where=where), where=where)
        elif name in _NESTED and isinstance(value, str) and value.lstrip().startswith("-"):
            _add(values, _options(_split(value, where=where), where=where), where=where)
        elif name in SETTINGS and isinstance(value, Mapping | list):
            raise UsageError(f"{key} must be a single value, not {kind_of(value)}", where=where)
        else:
            _add(values, {str(key): value}, where=where)


def _add(values: dict[str, object], more: Document, *, where: str) -> None:
    """Add settings; one that stands in two places must be the same in both."""
    for key, value in more.items():
        if value is None:
            continue
        if key in values and values[key] != value and canonical_name(key) in SETTINGS:
            raise UsageError(f"{key} is both {excerpt(values[key])} and {excerpt(value)}", where=where)
        values[key] = value


# -- command lines ---------------------------------------------------------------------------------------


def parse_serve_command(text: str, *, where: str) -> ServerSettings:
    """Read a `vllm serve MODEL --option value …` command line, alone or inside a shell script.

    Takes `--option value`, `--option=value`, `-tp 2`, switches and their `--no-` forms, and counts such as `16k`
    (16,000) and `16K` (16,384), as vLLM does. Nothing is executed or expanded.

    Args:
        text: The command line or the script.
        where: Name of the source, for errors.

    Raises:
        UsageError: No such command in it, quotes that do not close, or a value that cannot be.
    """
    if len(text) > _MAX_BYTES:
        raise UsageError(f"is larger than {_MAX_BYTES:,} bytes", where=where)
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        if "vllm" not in line or line.lstrip().startswith("#"):
            continue
        words = _serve_arguments(_split(line, where=where), where=where)
        if words is not None:
            return settings_from(_options(words, where=where), where=where, source="read")
    raise UsageError(
        "holds no `vllm serve` command", where=where, hint="give the line that starts the server"
    )


def _split(line: str, *, where: str) -> list[str]:
    if len(line) > _MAX_COMMAND_CHARS:
        raise UsageError(f"has a line of more than {_MAX_COMMAND_CHARS:,} characters", where=where)
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"is no command line ({error})", where=where) from None


def _serve_arguments(words: list[str], *, where: str) -> list[str] | None:
    """Return the words after `vllm serve`, the server's module or its image, up to the end of the command."""
    for index, word in enumerate(words):
        if "vllm serve" in word:  # a whole command in quotes, as for `bash -c`
            return _serve_arguments(_split(word, where=where), where=where)
        follows = words[index + 1 : index + 2]
        if word.rsplit("/", 1)[-1] == "vllm" and follows == ["serve"]:
            return _until_end(words[index + 2 :])
        if word in _MODULES or word.startswith(_IMAGE):
            return _until_end(words[index + 1 :])
    return None


def _until_end(words: list[str]) -> list[str]:
    ends = ("&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>", "&>")
    end = next((index for index, word in enumerate(words) if word in ends), len(words))
    return words[:end]


def _options(words: list[str], *, where: str) -> dict[str, object]:
    """Turn words into settings; the one word that belongs to no option is the model."""
    values: dict[str, object] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            _add(values, {"model": word}, where=where)
            continue
        flag, equals, attached = word.partition("=")
        value = attached if equals else None
        if value is None and rest and _takes(flag, rest[0]):
            value = rest.pop(0)
        name, meant = _option_value(flag, value, where=where)
        _add(values, {name: meant}, where=where)
    return values


def _is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _takes(flag: str, word: str) -> bool:
    """Tell whether the word after an option is its value; a switch takes only true or false, as it once did."""
    name = canonical_name(flag)
    if name in _SWITCHES or name.removeprefix("no_") in _SWITCHES:
        return word.lower() in {"true", "false"}
    return not _is_option(word)


def _option_value(flag: str, value: str | None, *, where: str) -> tuple[str, object]:
    """Return a setting's name and what its option means."""
    name = canonical_name(flag)
    if value is None:
        if name.startswith("no_") and canonical_name(name[3:]) in _SWITCHES:
            return canonical_name(name[3:]), False
        if name in SETTINGS and name not in FLAGS:
            raise UsageError(f"{flag} has no value", where=where)
        return name, True
    if value.startswith("$") and name in SETTINGS:
        raise UsageError(
            f"{flag} is the shell variable {excerpt(value)}", where=where, hint="write the value out"
        )
    return name, value if name in TEXTS else _literal(value)


def _literal(value: str) -> object:
    """Read a word of a command line as the number or truth value it is, else as text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    count = _COUNT.fullmatch(value)
    if count is None:
        return value
    number = float(count[1]) * _UNITS[count[2]] if count[2] else float(count[1])
    return int(number) if number.is_integer() else number


# -- the server's own log --------------------------------------------------------------------------------


def parse_logged_arguments(text: str, *, where: str) -> ServerSettings:
    """Read the line in which vLLM logs its arguments: `non-default args: {…}` or `args: Namespace(…)`.

    The last such line counts, since a log can hold several starts. Values that are no plain literals
    (nested configuration objects) are passed over.

    Args:
        text: The log, or the line alone.
        where: Name of the source, for errors.

    Raises:
        UsageError: No such line, or a value that its setting cannot have.
    """
    values = _find_logged(text)
    if values is None:
        raise UsageError(
            "holds no line with vLLM's arguments", where=where, hint="look for `non-default args:`"
        )
    return settings_from(values, where=where, source="read")


def _find_logged(text: str) -> dict[str, object] | None:
    for line in reversed(text.splitlines()):
        if "args:" not in line or len(line) > _MAX_COMMAND_CHARS:
            continue
        logged = _LOGGED_DICT.search(line)
        if logged is not None:
            return _logged_dict(logged[1])
        namespace = _LOGGED_NAMESPACE.search(line)
        if namespace is not None:
            return {name: _python(value) for name, value in _NAMESPACE_ITEM.findall(namespace[1])}
    return None


def _logged_dict(text: str) -> dict[str, object]:
    try:
        with warnings.catch_warnings():  # an odd escape in a logged path is not the reader's to hear of
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None  # an object's repr among the values; the plain items can be told without it
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return {name: _python(item) for name, item in _DICT_ITEM.findall(text)}


def _python(literal: str) -> object:
    """Read one of the literals `_LITERAL` matches."""
    value: object = ast.literal_eval(literal)
    return value
