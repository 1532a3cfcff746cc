"""Rooms of the package know only the rooms to their left, no import runs in a circle, and files are touched in few
modules.

Every import counts: those inside functions and those for type checkers too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tracefit
from tracefit.recordings import RECORDINGS
from tracefit.tables.schema import TABLES
from tracefit.tables.sources import SOURCES

PACKAGE = Path(__file__).parents[1] / "pipeline" / "tracefit"

ORDER = (
    ("_version", "errors", "progress", "memory", "statistics", "text", "evaluator"),
    ("options",),
    ("inputs",),
    ("otlp",),
    ("tables",),
    ("results",),
    ("server",),
    ("models",),
    ("recordings", "timeline", "receive"),
    ("features",),
    ("fit",),
    ("coefficients",),
    ("replay",),
    ("consumers", "diagnostics"),
    ("engines",),
    ("reports",),
    ("synth",),
    ("commands",),
    ("__init__",),
    ("console",),
    ("cli",),
)
"""From left to right, as DESIGN draws them; rooms in one place know nothing of each other."""

PLACES = {room: place for place, rooms in enumerate(ORDER) for room in rooms}
MODULES = {
    ".".join(("tracefit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@cache
def _nodes(path):
    """Return every node of a module's syntax."""
    return tuple(ast.walk(_tree(path)))


@cache
def _tree(path):
    return ast.parse(path.read_text())


@cache
def _imported(module):
    """Return the modules of the package that a module imports."""
    names = set()
    for node in _nodes(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    modules = names & MODULES.keys()
    # `from tracefit.cli import models` needs the module, not what the room's __init__ imports in turn.
    return modules - {m for m in modules if any(other.startswith(f"{m}.") for other in modules)} - {module}


def _room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_a_place():
    assert {_room(module) for module in MODULES} == PLACES.keys()


@pytest.mark.parametrize("own", sorted(PLACES))
def test_a_room_knows_only_rooms_to_its_left(own):
    known = {(m, other) for m in MODULES if _room(m) == own for other in _imported(m) if _room(other) != own}
    assert {(m, other) for m, other in known if PLACES[_room(other)] >= PLACES[own]} == set()


@pytest.mark.parametrize("room", sorted(PLACES))
def test_no_import_runs_in_a_circle(room):
    """The order of the rooms excludes circles between them, so each room is checked by itself."""
    own = {m for m in MODULES if _room(m) == room}
    try:
        TopologicalSorter({m: _imported(m) & own for m in own}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def _named(path):
    """Return the classes and the public type aliases of a module: what annotations can say of it."""
    body = _tree(path).body
    for node in [n for top in body for n in (top.body if isinstance(top, ast.If) else [top])]:
        if isinstance(node, ast.ClassDef):
            yield node.name
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            # CONSTANTS are written another way.
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def test_no_class_or_alias_stands_for_two_things():
    named = Counter(name for path in MODULES.values() for name in _named(path))
    assert [name for name, count in named.items() if count > 1] == []


CONVENTIONS = {
    # Each module of these rooms declares the same thing under the same name.
    "FORMAT": ("inputs", "recordings"),
    **dict.fromkeys(("_FIND", "_BEGIN", "_MOST_TOGETHER"), ("inputs",)),
    **dict.fromkeys(("_KNOWN", "_PROGRAM", "_MOST_SEARCHED", "_WRITTEN_BY"), ("recordings",)),
    **dict.fromkeys(("NAME", "SYNTAX", "PIECE_BYTES"), ("otlp",)),
}


def _constants(path):
    """Return the constants of a module: what its top assigns to a name of capitals; a type variable has no meaning of
    its own."""
    body = _tree(path).body
    targets = [
        (target, node.value)
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (each.elts if isinstance(each, ast.Tuple) else [each])
    ]
    return {
        target.id
        for target, value in targets
        if isinstance(target, ast.Name) and target.id.isupper() and "TypeVar" not in ast.unparse(value)[:8]
    }


def test_no_constant_stands_for_two_things():
    named = Counter(
        name
        for module, path in MODULES.items()
        for name in _constants(path)
        if _room(module) not in CONVENTIONS.get(name, ())
    )
    assert [name for name, count in named.items() if count > 1] == []


DATACLASSES = {
    # Values of coefficient files and the evaluation, and documents of users: pydantic reads them.
    "features/sets.py",
    "fit/results.py",
    "models/schema.py",
    "models/validation.py",
    "server/hardware.py",
    # Results: users make frames of them, which polars and pandas do of dataclasses.
    "models/predict.py",
    "models/request.py",
    "reports/trained.py",
    "results/models.py",
    "results/plans.py",
    "results/replays.py",
    "results/requests.py",
    "results/traces.py",
    "tables/health.py",
    # Options: a field has its flag as metadata.
    "options.py",
    "receive/options.py",
    "synth/options.py",
    # Fields that are not arguments, or that comparisons leave out.
    "models/deployment.py",
    "models/formulas.py",
    "receive/http_server.py",
    "replay/day.py",
    "replay/engine.py",
    "replay/plan.py",
    # A base with abstract methods.
    "consumers/blis_replay.py",
}
"""Modules with dataclasses. All other values are structs of msgspec, which are made 25 times as quickly: a command
imports 200 of them."""


def test_values_are_structs():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES.values()
        for node in _nodes(path)
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert found == DATACLASSES


def test_no_private_names_of_libraries_are_imported():
    """They change without notice."""
    imported = {
        f"{path.name}: {node.module}.{alias.name}"
        for path in MODULES.values()
        for node in _nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("tracefit", "__future__"))
        for alias in node.names
        if re.search(r"(^|\.)_", f"{node.module}.{alias.name}")
    }
    assert imported == set()


def test_an_import_changes_nothing_that_a_process_shares():
    """A call at the top of a module is there for its effect: on a class of the module, or a handler that every library
    adds."""
    calls = {
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node.value.func))
        for path in MODULES.values()
        for node in _tree(path).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    }
    assert calls == {
        ("cli/__main__.py", "main"),
        ("receive/grpc_server.py", "logging.getLogger('grpc._cython.cygrpc').addHandler"),
        ("server/documents.py", "_Loader.add_constructor"),
    }


MOST_PARAMETERS = 8
"""Parameters of a function, without options: what belongs together is a struct with a name of its own."""


def _parameters(function, *, has_options):
    """Return the parameters of a function; without those that must be named, if these are options."""
    of = function.args
    named = [] if has_options else [*of.kwonlyargs, *filter(None, [of.kwarg])]
    every = [*of.posonlyargs, *of.args, *filter(None, [of.vararg]), *named]
    return [parameter.arg for parameter in every if parameter.arg not in ("self", "cls")]


def _functions(module):
    """Yield the functions of a module, each with whether its named parameters are options, which users of the library
    give."""
    offered = {name for name, home in tracefit._LAZY.items() if home == module}
    for node in _tree(MODULES[module]).body:
        is_offered = getattr(node, "name", None) in offered
        for one in ast.walk(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield one, is_offered and not getattr(one, "name", "_").startswith("_")


def _makes_a_command(decorator):
    return isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "command"


@pytest.mark.parametrize("room", sorted(PLACES))
def test_no_function_has_many_parameters(room):
    many = {
        (module, one.lineno, len(parameters))
        for module in MODULES
        if _room(module) == room
        for one, has_options in _functions(module)
        # There, every parameter of a command is an option.
        if not any(map(_makes_a_command, getattr(one, "decorator_list", ())))
        if len(parameters := _parameters(one, has_options=has_options)) > MOST_PARAMETERS
    }
    assert many == set()


@pytest.mark.parametrize(
    ("code", "count"),
    [("def f(self, a, /, b, *c, d, **e): pass", 5), ("f = lambda a, b=1: a", 2), ("def f(*, a): pass", 1)],
)
def test_parameters_of_every_kind_count(code, count):
    function = next(n for n in ast.walk(ast.parse(code)) if hasattr(n, "args") and not isinstance(n, ast.Call))
    assert len(_parameters(function, has_options=False)) == count


# -- who names a format of recordings --------------------------------------------------------------------

MAY_NAME_FORMATS = ("recordings/", "synth/", "receive/", "commands/receive.py")
"""They read such files, write them to try the readers, or receive records over a wire whose protocol has a name."""

OTHER_MEANINGS = {
    "client": {
        *("models/request.py", "commands/inspect.py", "commands/requests.py", "models/targets.py"),
        *("fit/alpha.py", "fit/latency.py", "replay/closed_loop.py", "reports/content.py"),
        *(
            "reports/terminal_results.py",
            "tables/arrivals.py",
            "tables/client_times.py",
            "tables/dialects.py",
        ),
        "tables/sources.py",
    },
    "log": {
        *("commands/drift.py", "fit/noise.py", "fit/speed.py", "reports/figures/elements.py"),
        *("timeline/request_counts.py", "inputs/containers/lines.py", "inputs/containers/exports.py"),
    },
}
"""Names that are also those of other things, and the modules with these: latencies, requests and benchmarks of clients;
logarithms, and keys of other programs' files."""


@cache
def _formats():
    """Return the names of formats and of the sources of their steps, and how these are called in texts."""
    sources = [source for source in SOURCES.values() if source.seen_by != "spans"]
    # A table may have the name of a format.
    names = {*RECORDINGS, *(source.name for source in sources)} - TABLES.keys()
    return names, {*(one.title for one in RECORDINGS.values()), *(source.recorder for source in sources)}


def _registers(module):
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register" for node in _nodes(MODULES[module])
    )


def _named_formats(nodes):
    """Yield the names of formats in some code: as words of a text, as members, and as modules; docstrings may
    explain."""
    names, titles = _formats()
    words = re.compile(rf"\b({'|'.join(sorted(names - OTHER_MEANINGS.keys(), reverse=True))})\b")
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                # A word that means other things too only counts as a whole text.
                yield from {text} & OTHER_MEANINGS.keys()
                yield from words.findall(text)
                yield from (title for title in titles if title.lower() in text.lower())
            case ast.Attribute(attr=member) if member.isupper():
                yield from {member.lower()} & names
            case ast.ImportFrom(module=str(module)) if module.startswith("tracefit.recordings."):
                yield from [module] if _registers(module) else []


@pytest.mark.parametrize("room", sorted(PLACES))
def test_no_module_outside_recordings_names_a_format(room):
    modules = {MODULES[m].relative_to(PACKAGE).as_posix(): MODULES[m] for m in MODULES if _room(m) == room}
    found = {
        (path, name)
        for path, module in modules.items()
        if not path.startswith(MAY_NAME_FORMATS)
        for name in _named_formats(_nodes(module))
    }
    assert {(path, name) for path, name in found if path not in OTHER_MEANINGS.get(name, ())} == set()


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('steps.filter(cycle_source="fpm")', "fpm"),
        ('x = f"{number} of fpm_gpu"', "fpm_gpu"),
        ('source == "log"', "log"),
        ('if "client" in sources: pass', "client"),
        ("CycleSource.LOG_INTERVAL", "log_interval"),
        ("sources.CLIENT.name", "client"),
        ('print("a record of forwardpassmetrics is cut")', "ForwardPassMetrics"),
        ("from tracefit.recordings.fpm import decode", "tracefit.recordings.fpm"),
        ("def f():\n    from tracefit.recordings.kv_events import read_kv", "tracefit.recordings.kv_events"),
    ],
)
def test_a_format_that_is_named_is_found(code, name):
    assert name in set(_named_formats([*ast.walk(ast.parse(code))]))


@pytest.mark.parametrize(
    "code",
    [
        '"""The log, or ForwardPassMetrics."""',
        "values.log()",
        'read("kv_events")',
        'x = "the log of a server"',
        "from tracefit.recordings.kv_columns import with_kv_cache",
    ],
)
def test_other_meanings_are_no_formats(code):
    assert set(_named_formats([*ast.walk(ast.parse(code))])) == set()


def _loaded(module):
    """Return the modules of the package that are loaded with a module: not what only functions or type checkers
    import."""
    loaded, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in MODULES:
            continue
        loaded.add(name)
        parents = [name.rpartition(".")[0]] if "." in name else []
        for node in _tree(MODULES[name]).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                parents += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                parents += [alias.name for alias in node.names]
        waiting += parents
    return loaded


def test_who_asks_for_sources_knows_those_of_recordings():
    """A source is there once its module is imported; rooms to the left of recordings leave that to their callers."""
    asking = [
        module
        for module in MODULES
        if "tracefit.tables.sources" in _imported(module) and PLACES[_room(module)] > PLACES["recordings"]
    ]
    assert len(asking) > 3
    assert [module for module in asking if "tracefit.recordings" not in _loaded(module)] == []


# -- where files are read and written --------------------------------------------------------------------

FILE_METHODS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "rmdir", "unlink", "touch"),
    *("iterdir", "rglob", "read_parquet", "scan_parquet", "write_parquet", "sink_parquet"),
    *("ParquetFile", "ParquetWriter", "FileIO", "OSFile", "read_csv", "scan_csv"),
}
NO_FILES = {
    "os._exit",
    "os.cpu_count",
    "os.fspath",
    "os.sched_getaffinity",
    "os.sched_setaffinity",
    "os.strerror",
}

TOUCH_FILES = {
    "coefficients/boxed.py",
    "commands/candidates.py",
    "commands/inspect.py",
    "commands/predict.py",
    "commands/receive.py",
    "commands/compare_points.py",
    "commands/scheduler.py",
    "commands/timed_requests.py",
    "console.py",
    "consumers/aisimulate.py",
    "engines/build.py",
    "evaluator.py",
    "inputs/blocks.py",
    "inputs/buckets.py",
    "inputs/compression.py",
    "inputs/discovery.py",
    "inputs/files.py",
    "inputs/folders.py",
    "memory.py",
    "receive/connections.py",
    "receive/grpc_server.py",
    "receive/options.py",
    "receive/runs.py",
    "receive/store.py",
    "recordings/kv_events.py",
    "reports/page.py",
    "server/documents.py",
    "synth/run.py",
    "tables/disk.py",
    "tables/external_sort.py",
    "tables/storage.py",
    "tables/store.py",
}
"""Modules that read or write files; everything between is functions over frames."""


def _touches_files(call):
    """Say whether a call reads or writes files, as far as its text shows; to ask whether one is there does not
    count."""
    match call.func:
        case ast.Name(id="open"):
            return True
        case ast.Attribute(value=ast.Name(id="os" | "shutil" | "tempfile" as module), attr=name):
            return f"{module}.{name}" not in NO_FILES
        case ast.Attribute(attr="replace"):
            # A path is replaced by a path: texts take two arguments, columns a dictionary.
            return len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Name | ast.BinOp)
        case ast.Attribute(attr=name):
            return name in FILE_METHODS
    return False


def test_files_are_read_and_written_in_few_modules():
    nodes = ((path, node) for path in MODULES.values() for node in _nodes(path))
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path, node in nodes
        if isinstance(node, ast.Call) and _touches_files(node)
    }
    assert found == TOUCH_FILES
    # Under another name the calls would not be seen.
    imported = {
        (module, node.module)
        for module, path in MODULES.items()
        for node in _nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile")
    }
    assert imported == set()
