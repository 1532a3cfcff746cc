"""The server of compose.yaml starts as it is written there: vLLM's own parser takes its flags, and its classes are
where it mounts them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("SERVER_PYTHON" not in os.environ, reason="no vLLM: `make test-vllm` names one"),
]

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from importlib import import_module
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser, serve = FlexibleArgumentParser(), ServeSubcommand()
serve.subparser_init(parser.add_subparsers())
arguments = parser.parse_args(["serve", *sys.argv[1:]])
serve.validate(arguments)
for name in (arguments.scheduler_cls, *arguments.middleware):
    module, _, of = name.rpartition(".")
    assert callable(getattr(import_module(module), of)), name
print(json.dumps([arguments.model_tag, arguments.otlp_traces_endpoint]))
"""


def test_its_flags_are_vllms_and_its_classes_are_found():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    server = services["vllm"]
    (mount,) = server["volumes"]
    source, target, access = mount.split(":")
    command = [part.replace("${MODEL:?the model to serve}", "some/model") for part in server["command"]]
    environment = {**server["environment"], "VLLM_LOGGING_LEVEL": "ERROR"}
    assert (environment["PYTHONPATH"], access) == (target, "ro")
    environment["PYTHONPATH"] = str(ROOT / source)
    done = subprocess.run(
        [os.environ["SERVER_PYTHON"], "-c", PROGRAM, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model, endpoint = json.loads(done.stdout.splitlines()[-1])
    assert model == "some/model"
    assert endpoint == "http://receive:4317", "by the name of the service, at its port for gRPC"
    assert "receive" in services
