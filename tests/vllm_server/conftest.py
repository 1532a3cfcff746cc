"""The plugin as pip installs it."""

from __future__ import annotations

import pytest

from vllm_server.real_server import install_plugin


@pytest.fixture(scope="session")
def plugin(tmp_path_factory):
    """Install the plugin into a folder, as pip does."""
    return install_plugin(tmp_path_factory.mktemp("plugin"))
