"""Our requirements beside those of the programs whose environments tracefit is installed into, and the lock files."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"]]

OTHERS = {
    # Requires-Dist of the wheel; numba 0.61.2, which it pins, holds numpy below 2.3.
    "vLLM 0.11.0": (
        "numpy>=1.24,<2.3",
        "protobuf",
        "pydantic>=2.11.7",
        "typing_extensions>=4.10",
        "msgspec",
        "pyyaml",
        "scipy",
    ),
    # Requires-Dist of the wheel, on x86-64.
    "vLLM 0.33.0": (
        "numpy",
        "protobuf!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*,>=5.29.6",
        "pydantic>=2.12.0",
        "typing_extensions>=4.10",
        "msgspec",
        "pyyaml",
    ),
    # Requires-Dist of the wheel and of its extras `default` and `data`.
    "Ray 2.49.0": (
        "msgpack<2.0.0,>=1.0.0",
        "protobuf>=3.20.3",
        "pyyaml",
        "numpy>=1.20",
        "pyarrow>=9.0.0",
        "opentelemetry-proto",
        "pydantic!=2.0.*,!=2.1.*,!=2.2.*,!=2.3.*,!=2.4.*,<3",
    ),
    # Its OTLP exporter pins the proto package of its own version, which holds protobuf below 7.
    "opentelemetry-sdk 1.37.0 and its OTLP exporter": (
        "opentelemetry-proto==1.37.0",
        "protobuf<7.0,>=5.0",
        "typing-extensions>=4.6.0",
    ),
    # The oldest SDK that vLLM 0.33 takes.
    "opentelemetry-sdk 1.27.0 and its OTLP exporter": (
        "opentelemetry-proto==1.27.0",
        "protobuf<5.0,>=3.19",
    ),
    # The oldest one that tracefit works with.
    "opentelemetry-sdk 1.26.0 and its OTLP exporter": (
        "opentelemetry-proto==1.26.0",
        "protobuf<5.0,>=3.19",
    ),
}
TOGETHER = ("vLLM 0.11.0", "Ray 2.49.0", "opentelemetry-sdk 1.37.0 and its OTLP exporter")
"""Packages of one environment of late 2025."""


def _common_version(requirements):
    """Return a version that all requirements take, if there is one.

    A range that is not empty holds one of its bounds or the patch after one: no index of releases is asked.
    """
    bounds = [Version(s.version.removesuffix(".*")) for r in requirements for s in r.specifier if s.operator != "!="]
    after = [Version(f"{b.major}.{b.minor}.{b.micro + 1}") for b in bounds]
    taken = (v for v in sorted([*bounds, *after]) if all(v in r.specifier for r in requirements))
    return next(taken, None)


def _conflicts(*others):
    found = []
    for requirement in REQUIREMENTS:
        name = canonicalize_name(requirement.name)
        same = [r for text in others if canonicalize_name((r := Requirement(text)).name) == name]
        if same and _common_version([requirement, *same]) is None:
            found.append([str(requirement), *map(str, same)])
    return found


@pytest.mark.parametrize("other", OTHERS)
def test_another_program_and_tracefit_share_an_environment(other):
    assert _conflicts(*OTHERS[other]) == []


def test_server_programs_and_tracefit_share_an_environment():
    assert _conflicts(*(text for other in TOGETHER for text in OTHERS[other])) == []


def test_a_conflict_is_found():
    assert _conflicts("protobuf<4") == [[next(str(r) for r in REQUIREMENTS if r.name == "protobuf"), "protobuf<4"]]


def _pinned(file):
    pins = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / file).read_text(), re.MULTILINE)
    versions = {}
    for name, version in pins:
        versions.setdefault(canonicalize_name(name), set()).add(Version(version))
    return versions


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_minimum_lock_pins_each_lower_bound(requirement):
    """So that what `make test-minimum` installs is what pyproject.toml declares."""
    (bound,) = (s for s in requirement.specifier if s.operator == ">=")
    assert _pinned("requirements-minimum.lock")[canonicalize_name(requirement.name)] == {Version(bound.version)}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_lock_pins_every_requirement_at_a_version_it_takes(requirement):
    versions = _pinned("requirements.lock")[canonicalize_name(requirement.name)]
    assert versions
    assert all(version in requirement.specifier for version in versions)


MODULES = {
    "backports.zstd": "backports",
    "opentelemetry-proto": "opentelemetry",
    "protobuf": "google",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "googleapis-common-protos": "google",
    "grpcio": "grpc",
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
}
"""Requirement to the module it is imported as, where these differ."""

BROUGHT = {"pydantic_core": "pydantic", "markupsafe": "jinja2"}
"""Modules that a requirement always brings."""


@cache
def _imports() -> tuple[tuple[str, set[str]], ...]:
    """Return the rooms, once for each of their modules, and the packages that the module imports."""
    package = ROOT / "pipeline/tracefit"
    found = []
    for path in package.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
        found.append((path.relative_to(package).parts[0], names))
    return tuple(found)


def _imported(*left_out):
    """Return the third-party modules that the package imports, outside some of its rooms."""
    names = set().union(*(imported for room, imported in _imports() if room not in left_out))
    return names - sys.stdlib_module_names - {"tracefit", "compression"}  # of the standard library from 3.14 on


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_what_is_always_installed_is_used_by_more_than_an_extra(requirement):
    """Generated traces, the report's page and the receiver are not what everybody needs."""
    name = canonicalize_name(requirement.name)
    assert MODULES.get(requirement.name, MODULES.get(name, name)) in _imported("synth", "receive", "reports")


def test_what_is_imported_is_required():
    extras = PROJECT["optional-dependencies"]
    own = [
        *PROJECT["dependencies"],
        *(text for name in ("buckets", "ray", "receive", "report") for text in extras[name]),
    ]
    names = [Requirement(text).name for text in own]
    known = {MODULES.get(n, MODULES.get(canonicalize_name(n), canonicalize_name(n))) for n in names}
    assert _imported() - known - BROUGHT.keys() == set()
    assert set(BROUGHT.values()) <= {canonicalize_name(n) for n in names}


def test_an_upper_bound_has_its_reason_beside_it():
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if re.match(r'\s+"[\w.-]+[^"#]*[<~=]=?[^"]*"', line.partition(";")[0]) and "<" in line.partition(";")[0]:
            assert "#" in line, line
