"""A run has one configuration: a start with other settings writes to a run folder of its own, the same one each
time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grpc
import pytest
import yaml

from tracefit.commands.receive import run_folders
from tracefit.options import ServerOptions
from tracefit.receive.runs import RunFolders, folder_name

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
FIRST = {"model": "org/m", "max_num_seqs": 64}


def started(root, settings=None, **facts):
    """Return the name of the run folder that a start of the receiver writes to."""
    facts = {"gpu": "H100", **facts}
    folders = run_folders(root, ServerOptions(settings=settings, **facts))
    return folders.make("vllm", "engine").parent.name


def config(folder):
    return yaml.safe_load((folder / "exp-config.yaml").read_text())


def test_other_settings_have_a_run_of_their_own_and_the_same_ones_the_same(tmp_path):
    second = {**FIRST, "max_num_seqs": 128}
    assert started(tmp_path, FIRST) == "vllm"
    own = started(tmp_path, second)
    assert own.startswith("vllm-")
    assert started(tmp_path, FIRST) == "vllm"
    assert started(tmp_path, dict(reversed(second.items()))) == own
    assert config(tmp_path / "vllm")["max_num_seqs"] == 64
    assert config(tmp_path / own)["max_num_seqs"] == 128
    third = started(tmp_path, {**FIRST, "max_num_seqs": 256})
    assert len({third, own, "vllm"}) == 3


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({**FIRST, "max_num_batched_tokens": 2048}, {}),
        ({"model": "org/m"}, {}),
        (FIRST, {"gpu": "A100"}),
        (FIRST, {"tp": 2}),
        ({**FIRST, "site": "lab"}, {}),
    ],
    ids=["one more", "one less", "GPU", "parallel", "unknown one"],
)
def test_every_difference_counts(tmp_path, settings, facts):
    assert started(tmp_path, FIRST) == "vllm"
    assert started(tmp_path, settings, **facts) != "vllm"
    assert started(tmp_path, FIRST) == "vllm"


def test_a_model_of_another_configuration_is_another_run(tmp_path, config_of):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, model in zip(paths, ("llama-2-7b", "codellama-34b"), strict=True):
        path.write_text(json.dumps(config_of(model)))
    root = tmp_path / "out"
    names = [started(root, FIRST, model_config=path) for path in (paths[0], paths[1], paths[0])]
    assert names[0] == names[2] == "vllm" != names[1]
    assert (root / names[1] / "config.json").read_bytes() == paths[1].read_bytes()


def test_what_a_user_fills_in_changes_nothing(tmp_path):
    """Also if the command states the same later."""
    assert started(tmp_path, FIRST) == "vllm"
    path = tmp_path / "vllm" / "exp-config.yaml"
    path.write_text(path.read_text().replace("# max_model_len:", "max-model-len: 4096"))
    assert started(tmp_path, FIRST) == "vllm"
    assert started(tmp_path, {**FIRST, "max_model_len": 4096}) == "vllm"
    assert started(tmp_path, {**FIRST, "max_model_len": 8192}) != "vllm"


def test_a_start_that_states_nothing_goes_on_with_the_run(tmp_path):
    assert started(tmp_path, FIRST) == "vllm"
    assert started(tmp_path, gpu=None) == "vllm"


def test_a_run_with_nothing_stated_is_not_one_with_settings(tmp_path):
    assert started(tmp_path, gpu=None) == "vllm"
    assert started(tmp_path, FIRST) != "vllm"


@pytest.mark.parametrize("name", ["exp-config.yaml", "run.yaml"])
def test_a_configuration_that_the_user_put_there_is_compared_by_meaning(tmp_path, name):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / name).write_text("model: org/m\ngpu: H100\nargs: --max-num-seqs 64 --seed 1\n")
    assert started(tmp_path, FIRST) == "vllm"
    assert started(tmp_path, {**FIRST, "max_num_seqs": 128}) != "vllm"


@pytest.mark.parametrize("content", [b"model: [", b"\xff\xfe\x00", b"- a list"])
def test_a_configuration_that_cannot_be_read_is_left_alone(tmp_path, content):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "exp-config.yaml").write_bytes(content)
    own = started(tmp_path, FIRST)
    assert own != "vllm"
    assert started(tmp_path, FIRST) == own
    assert (tmp_path / "vllm" / "exp-config.yaml").read_bytes() == content


def test_a_change_while_the_receiver_runs_does_not_divide_the_run(tmp_path):
    """It counts at the next start; a removed folder is chosen again at once."""
    folders = run_folders(tmp_path, ServerOptions(settings=FIRST))
    assert folders.make("vllm", "a") == tmp_path / "vllm" / "a"
    (tmp_path / "vllm" / "exp-config.yaml").write_text("model: other\n")
    assert folders.make("vllm", "b") == tmp_path / "vllm" / "b"
    own = run_folders(tmp_path, ServerOptions(settings=FIRST)).make("vllm", "a").parent
    assert own != tmp_path / "vllm"
    shutil.rmtree(tmp_path / "vllm")
    assert folders.make("vllm", "c") == tmp_path / "vllm" / "c"
    assert config(tmp_path / "vllm") == FIRST


def test_no_service_shares_the_folder_of_another_ones_settings(tmp_path):
    (tmp_path / "vllm").mkdir()
    folders = RunFolders(tmp_path, {"exp-config.yaml": b"a: 1\n"}, lambda run: "all" if run.is_dir() else "")
    own = folders.make("vllm", "")
    assert own.parent == tmp_path
    assert folder_name(own.name) != own.name
    assert folders.make(own.name, "") != own


@pytest.mark.slow
def test_a_start_says_in_one_line_where_spans_go(lib, start, tmp_path):
    """For each service whose run has other settings; the folders of its own starts are not named again."""

    def receive(seqs):
        receiver = start(tmp_path, "--set", f"max_num_seqs={seqs}")
        with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}") as channel:
            for service in ("one", "two"):
                channel.unary_unary(EXPORT)(lib.request(seqs, service=service).SerializeToString(), timeout=30)
        return receiver.before, receiver.end()[1]

    assert receive(64)[0] == ""
    before, _ = receive(128)
    own = {path.name.rpartition("-")[0]: path for path in Path(tmp_path).iterdir() if "-" in path.name}
    assert before == (
        "warning: one/ has other settings (max_num_seqs: 64 there, 128 now): what its service sends goes to "
        f"{own['one'].name}/, a run of its own; so it is with 1 other run\n"
    )
    assert receive(128)[0] == before
    assert receive(64)[0] == ""
    assert [len(lib.span_ids(tmp_path / name)) for name in ("one", own["one"].name, own["two"].name)] == [
        2,
        2,
        2,
    ]
    assert own.keys() == {"one", "two"}
