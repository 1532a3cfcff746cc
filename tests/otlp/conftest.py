from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from otlp import helpers

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture(scope="session")
def otlp() -> ModuleType:
    """Return records, containers and a reader, shared by the tests of this folder."""
    return helpers
