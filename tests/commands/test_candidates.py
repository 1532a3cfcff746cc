"""Servers to choose from: prices, servers that are computed, and the table of what each costs."""

import json

import pytest

import tracefit
from tracefit.commands.candidates import parse_tries, tried_servers
from tracefit.commands.prices import parse_prices
from tracefit.errors import UsageError
from tracefit.synth.laws import MODELS

LOAD = ("--rate", 4, "--prompt", 300, "--output", 40)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama-8b"].config()))
    return path


@pytest.fixture
def command(request):
    """Return the function that runs the entry point, under a name that is not the library's."""
    return request.getfixturevalue("tracefit")


def test_prices_are_one_or_of_each_gpu():
    assert parse_prices([]) is None
    assert parse_prices(["2.5"]) == 2.5
    assert parse_prices(["H100=2.5", "H200=3.5"]) == {"H100": 2.5, "H200": 3.5}
    for texts in (["2.5", "H100=3"], ["H100=much"], ["2", "3"]):
        with pytest.raises(UsageError, match="not one price"):
            parse_prices(texts)


def test_values_to_try_are_listed():
    assert parse_tries(["gpu=H100, H200", "tp=1,2", "tensor_parallel=4,2"]) == {
        "gpu": ("H100", "H200"),
        "tp": ("1", "2", "4"),
    }
    for text in ("gpu", "gpu=", "tokens=3"):
        with pytest.raises(UsageError, match="not of the form"):
            parse_tries([text])


def test_what_does_not_fit_is_left_out_by_name(tmp_path):
    large = tmp_path / "config.json"
    large.write_text(json.dumps(MODELS["llama-70b"].config()))
    with tried_servers([], {"gpu": ["H100"], "tp": ["2", "3", "4"]}, large) as tried:
        assert [name for name, _ in tried.folders] == ["H100-SXM tp4"]
        assert all((folder / "beta.json").is_file() for _, folder in tried.folders)
    two, three = tried.left_out
    assert two.startswith("H100-SXM tp2: ")
    assert "leave no room for a KV cache" in two
    assert "cannot be divided over 3" in three


@pytest.mark.slow
def test_the_cheapest_is_first(config, command):
    asked = (
        "--try",
        "gpu=H100,H200",
        "--try",
        "tp=1,2",
        "--model-config",
        config,
        *LOAD,
        "--slo",
        "itl_p90=40",
    )
    prices = ("--price", "H100=2", "--price", "H200=9")
    code, out, _ = command("plan", *asked, *prices, "--json")
    assert code == 0
    ranked = json.loads(out)["ranked"]
    assert [(one["name"], one["gpus"], one["cost_per_hour"]) for one in ranked] == [
        ("H100-SXM tp1", 1, 2.0),
        ("H100-SXM tp2", 2, 4.0),
        ("H200-SXM tp1", 1, 9.0),
        ("H200-SXM tp2", 2, 18.0),
    ]
    assert [one["ties"] for one in ranked] == [True, False, False, False]
    assert {one["origin"] for one in ranked} == {"transferred"}
    assert {one["binds"] for one in ranked} == {"itl_p90_ms"}
    # Without prices the GPUs decide.
    code, out, _ = command("plan", *asked)
    assert code == 0
    head, first, *_ = out.splitlines()
    assert "cost" not in head
    assert first.split()[:4] == ["=", "H100-SXM", "tp1", "1"]


@pytest.mark.slow
def test_one_kind_of_server_has_no_table(config, tmp_path):
    server = tracefit.ServerOptions(model_config=config, gpu="H100", tp=2)
    tracefit.transfer((), tmp_path / "new", server=server)
    load = tracefit.LoadOptions(prompt=300, output=40)
    result = tracefit.plan(tmp_path / "new", rate=4, slo_ms={"itl_p90": 40}, requests=load, price={"H100": 2.0})
    assert result.ranked == ()
    assert result.plans[0].gpu == "H100-SXM"
    assert result.plans[0].cost_per_million_tokens == pytest.approx(1e6 * 2 * 2 / 3600 / (4 * 340), rel=0.05)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (("--try", "gpu=H100"), "--model-config is not given"),
        (("--try", "tp=2", "--model-config", "config.json"), "gpu=... is not given"),
        (("--try", "gpu=quantum", "--model-config", "config.json"), "GPU 'quantum' is not known"),
        (("--try", "gpu=H100", "--try", "tp=0", "--model-config", "config.json"), "tp=0: no number of GPUs"),
        (("--try", "gpu=H100", "--price", "-1"), "--price -1: is out of range"),
        (("--try", "gpu=H100", "--price", "quantum=1"), "GPU 'quantum' is not known"),
        (("--rate", "1"), "no folder is given"),
    ],
)
def test_wrong_questions_are_one_line(asked, line, command):
    code, _, err = command("plan", *LOAD, "--slo", "itl_p90=40", *asked)
    assert code == 2
    assert line in err
    assert err.count("\n") == 1


def test_too_many_combinations_are_refused(config, command):
    tries = ("--try", "gpu=H100,H200,B200", "--try", f"tp={','.join(map(str, range(1, 40)))}")
    code, _, err = command("plan", *tries, "--model-config", config, *LOAD, "--slo", "itl_p90=40")
    assert code == 2
    assert "117 combinations are too many" in err
