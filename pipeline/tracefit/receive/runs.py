"""The run folder of each service: one for each set of settings that the receiver was started with.

`OUT/<service.name>/exp-config.yaml` makes a run of everything below it; its files are in a folder for each
service.instance.id, because the API process and the engine core of one server are two instances with newer
SDKs, and belong to one run. A run has one configuration. If the one that is there has other settings than this start
of the receiver, the spans go to a folder of their own, `<service.name>-<hash of the settings>`.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from tracefit.inputs.folders import clean_run_id
from tracefit.tables.disk import sync_folder, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_PLAIN_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RUN_HASH_DIGITS = 8
_LIKE_OURS = re.compile(r".*(-[0-9a-f]{8}|\.(json|yaml))")
"""Names with a hash, as cleaned ones have it, and names of files that commands look for, such as manifest.json."""

_KNOWN_SERVICES = 4096


def folder_name(text: str) -> str:
    """Return the name of the folder for a service or an instance: the name itself, or a cleaned one with a hash of it.

    Names come from the network: no folder is outside the root, is hidden or has the name of a file, and two different
    names do not share a folder.
    """
    if _PLAIN_RUN_NAME.fullmatch(text) and not text.endswith(".") and not _LIKE_OURS.fullmatch(text):
        return text
    return f"{clean_run_id(text[:200])[:80]}-{_hash_of(text.encode())}"


class OtherRun(NamedTuple):
    """A run folder whose settings are not those of this start, how they differ, and the folder that is used instead."""

    folder: Path
    difference: str
    used: Path


class RunFolders:
    """Chooses run folders and makes them.

    Args:
        root: The folder that they are in.
        configs: The configuration files of each run, by name.
        difference: Returns how the configuration in a run folder differs from these files; an empty text if it does
            not.
    """

    def __init__(
        self, root: Path, configs: Mapping[str, bytes], difference: Callable[[Path], str] = lambda _: ""
    ) -> None:
        self._root = root
        self._configs = configs
        self._difference = difference
        # The order of settings, and comments, are not settings.
        lines = (sorted(line for line in text.splitlines() if line[:1] != b"#") for text in configs.values())
        self._settings = b"\n".join(line for of_file in lines for line in of_file)
        self._chosen: OrderedDict[str, Path] = OrderedDict()

    def make(self, service: str, instance: str) -> Path:
        """Return the folder for the files of an instance; make it, and the configuration of its run, if they are
        missing.
        """
        run = self._run_of(service)
        folder = run / folder_name(instance) if instance else run
        _make_folder(folder, self._root)
        for name, content in self._configs.items():
            # A user or an earlier start may have put one there.
            if not (run / name).exists():
                write_whole(run / name, content)
        return folder

    def others(self) -> Iterator[OtherRun]:
        """Yield the run folders of services that have other settings than this start."""
        for folder in sorted(self._root.iterdir()):
            # A folder of an earlier start of its own stays what it is.
            is_own = _LIKE_OURS.fullmatch(folder.name) and self._root.joinpath(folder.name[:-9]).is_dir()
            if folder.is_dir() and not is_own and (difference := self._difference(folder)):
                yield OtherRun(folder, difference, self._own(folder))

    def _run_of(self, service: str) -> Path:
        # Chosen once, unless it is gone: a user may correct the configuration while the receiver runs.
        run = self._chosen.pop(service, None)
        if run is None or not all((run / name).exists() for name in self._configs):
            run = self._root / folder_name(service)
            if self._difference(run):
                run = self._own(run)
        self._chosen[service] = run
        if len(self._chosen) > _KNOWN_SERVICES:
            self._chosen.popitem(last=False)
        return run

    def _own(self, run: Path) -> Path:
        """Return the folder for these settings beside another run of the service."""
        settings = b"\n".join((run.name.encode(), self._settings))
        return run.with_name(f"{run.name}-{_hash_of(settings)}")


def _hash_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:_RUN_HASH_DIGITS]


def _make_folder(folder: Path, root: Path) -> None:
    """Make a folder below the root such that it survives a crash."""
    folder.mkdir(parents=True, exist_ok=True)
    for made in (folder, *folder.parents):
        sync_folder(made.parent)
        if made == root:
            break
