"""Options as typer reads them, their completion in a shell, and their conversion for the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tracefit.console import warn
from tracefit.options import ServerOptions, flag_in, from_flags, named, options_of

# -- completion in a shell --------------------------------------------------------------------------------


def _folders(context: typer.Context) -> list[str]:
    """Return the existing paths on the command line so far: a completion's arguments are not yet bound to
    parameters.
    """
    texts = [*context.args, *(str(v) for v in context.params.values() if isinstance(v, str | Path))]
    return [text for text in texts if Path(text).exists()]


def _deployment_ids(context: typer.Context, incomplete: str) -> list[str]:
    from tracefit.coefficients.models import load

    return _names_in(context, incomplete, lambda folder: load(folder).deployment_ids)


def _run_ids(context: typer.Context, incomplete: str) -> list[str]:
    from tracefit.commands.locate import scan

    return _names_in(context, incomplete, lambda folder: scan(folder, "runs").select("run_id").collect()["run_id"])


def _names_in(context: typer.Context, incomplete: str, names: Callable[[str], Iterable[str]]) -> list[str]:
    from tracefit.errors import TracefitError

    completions: set[str] = set()
    for folder in _folders(context):
        with suppress(TracefitError):
            completions.update(name for name in names(folder) if name.startswith(incomplete))
    return sorted(completions)


def _consumer_names() -> list[str]:
    from tracefit.consumers import CONSUMERS

    return list(CONSUMERS)


def _gpu_names(incomplete: str) -> list[str]:
    from tracefit.server.hardware import CATALOGUE

    return [gpu.name for gpu in CATALOGUE.values() if gpu.name.startswith(incomplete)]


# -- options as typer reads them ------------------------------------------------------------------------

_COMPLETIONS: Mapping[str | None, Callable[..., list[str]]] = {
    "deployments": _deployment_ids,
    "runs": _run_ids,
    "gpus": _gpu_names,
    "consumers": _consumer_names,
}


_ARGUMENT_TYPES: Mapping[Any, Any] = {
    str | Path: str,
    str | Path | None: str | None,
    str | Path | Iterable[str | Path]: list[str],
    str | Path | Iterable[str | Path] | None: list[str] | None,
    tuple[str, ...]: list[str] | None,
    Mapping[str, object] | None: list[str] | None,
    Mapping[str, Iterable[str]] | None: list[str] | None,
    float | Mapping[str, float] | None: list[str] | None,
}
"""Type of an option in Python to its type on the command line. A path may be a URL: `Path` would join its two
slashes."""


def parameters_of(declared: type) -> Iterator[inspect.Parameter]:
    """Yield the options of a class."""
    kinds = get_type_hints(declared)
    for name, (flag, default) in options_of(declared).items():
        shown = str(default) if flag.kind is str else None if default == () else default
        yield parameter_of(name, Annotated[kinds[name], flag], shown)


def parameter_of(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Return a parameter as typer reads it; `kind` has an `OptionFlag`, or is one of typer already."""
    flag = flag_in(kind)
    if flag is not None:
        plain = kind.__origin__
        make = typer.Argument if flag.positional else partial(typer.Option, flag.spelled(flag.argument or name))
        text = None if flag.kind or flag.positional else _ARGUMENT_TYPES.get(plain)
        declared = make(
            help=flag.help,
            metavar=flag.metavar or ("PATH" if text in (str, str | None) else None),
            min=flag.minimum,
            max=flag.maximum,
            autocompletion=_COMPLETIONS.get(flag.completion),
        )
        kind = Annotated[flag.kind or _ARGUMENT_TYPES.get(plain, plain), declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


# -- their values for the library -----------------------------------------------------------------------


def server_options(options: Mapping[str, Any], *, model: str | None = None) -> ServerOptions:
    """Collect the facts about the servers behind the traces; a setting of the user wins over `model`."""
    from tracefit.commands.ingest import parse_assignments
    from tracefit.server.settings import SETTING_NAMES, canonical_name

    settings = parse_assignments(options["settings"] or [])
    settings = {"model": model, **settings} if model else settings
    # A misspelt setting is refused by `parse_assignments`; one of a newer vLLM, which is not in the list yet, has to
    # pass.
    for key in settings:
        if canonical_name(key) not in SETTING_NAMES:
            warn(
                f"{named(ServerOptions, 'settings')} {key}: unknown setting; it is recorded and distinguishes "
                "deployments, but no model uses it"
            )
    return from_flags(ServerOptions, {**options, "settings": None}, settings=settings)
