"""The plugin as pip installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def plugin(tmp_path_factory):
    """Install the plugin into a folder, as pip does."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "pipeline/tracefit-vllm", folder / "source")  # where pip builds
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", folder / "site")
    subprocess.run([os.environ["SERVER_PYTHON"], "-m", "pip", "install", *options, source], check=True)
    return folder / "site"
