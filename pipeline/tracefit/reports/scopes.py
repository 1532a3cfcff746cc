"""Short names of scopes for people: an id without its hash, and a detail where several scopes share the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ScopeLabel:
    """A scope as people write it.

    Attributes:
        name: The id without its hash, where that is enough to choose the scope; else the whole id.
        detail: Its runs and the settings that differ from those of scopes with the same name; empty where the name is enough.
    """

    name: str
    detail: str = ""


def scope_labels(scopes: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]) -> dict[str, ScopeLabel]:
    """Return a label for each of several scopes, unique among them.

    Args:
        scopes: Scope id to its runs and its settings.
    """
    shared = Counter(_without_hash(scope_id) for scope_id in scopes)
    labels = {}
    for scope_id, (runs, settings) in scopes.items():
        name = _without_hash(scope_id)
        if shared[name] == 1:
            labels[scope_id] = ScopeLabel(name)
            continue
        others = [s for other, (_, s) in scopes.items() if other != scope_id and _without_hash(other) == name]
        differing = [
            f"{key} {value}"
            for key, value in sorted(settings.items())
            if any(other.get(key) != value for other in others)
        ]
        named = f"run{'s' * (len(runs) > 1)} {', '.join(runs)}" if runs else ""
        labels[scope_id] = ScopeLabel(scope_id, "; ".join([*([named] if named else []), *differing]))
    return labels


def _without_hash(scope_id: str) -> str:
    """Return a scope id without its last part, eight hexadecimal digits of its settings."""
    name, _, digest = scope_id.rpartition(".")
    is_hash = len(digest) == 8 and all(c in "0123456789abcdef" for c in digest)
    return name if name and is_hash else scope_id
