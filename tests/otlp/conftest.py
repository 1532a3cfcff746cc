from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

HELPERS = Path(__file__).with_name("helpers.py")
NAME = "trace_file_helpers"


@pytest.fixture(scope="session")
def otlp() -> ModuleType:
    """Return records, containers and a reader, shared by the tests of this folder."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, HELPERS)
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]
