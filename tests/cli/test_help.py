"""Help and version of the command line, and how little it loads to print them."""

from __future__ import annotations

import json
import sys

import pytest
from typer.main import get_command

import tracefit as package
from tracefit.cli import app

COMMANDS = sorted(get_command(app).commands)


def test_commands_are_summed_up_in_a_line_that_fits(tracefit):
    _, out, _ = tracefit("--help")
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()[:1] and line.split()[0] in COMMANDS}
    assert sorted(lines) == COMMANDS
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("..") for line in lines.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(tracefit, command):
    code, out, err = tracefit(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: tracefit {command} " in " ".join(out.replace("`", "").split())
    assert "--json" in out


def test_the_version(tracefit):
    assert tracefit("--version") == (0, f"tracefit {package.__version__}\n", "")


def test_no_command_is_help(tracefit):
    code, out, err = tracefit()
    assert code in (0, 2)
    assert "ingest" in out + err


HEAVY = {
    *("polars", "sklearn", "pyarrow", "numpy", "scipy", "yaml"),
    *("matplotlib", "jinja2", "plotly", "pandas", "narwhals"),
}
LOADED = """
import json, sys
from tracefit.cli import main
try:
    main()
finally:
    print("\\n" + json.dumps(sorted({m.partition(".")[0] for m in sys.modules})))
"""


SLOW = {"pydantic", "rich", "markdown_it", "pygments"}
# typer itself takes pydantic to read the options that stand before a command's name.
HEAVY_TO = {
    ("--version",): HEAVY | SLOW,
    ("--help",): HEAVY | SLOW,
    ("run", "--help"): HEAVY | SLOW - {"pydantic"},
    ("predict", "--help"): HEAVY | SLOW - {"pydantic"},
}


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("arguments", HEAVY_TO)
def test_nothing_heavy_is_loaded_to_say_so(process, arguments):
    done = process(*arguments, code=LOADED)
    assert done.returncode == 0
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "typer" in loaded
    assert not loaded & HEAVY_TO[arguments]


def test_importing_the_package_loads_nothing_heavy(process):
    done = process(code="import sys, tracefit; print(sorted(sys.modules))")
    assert not any(f"'{name}'" in done.stdout for name in HEAVY | {"msgspec"})


@pytest.mark.slow
def test_features_wait_for_no_estimators(process):
    done = process("features", "batch", code=LOADED)
    assert done.returncode == 0
    assert not {"sklearn", "scipy"} & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_nothing_waits_for_estimators_that_it_does_not_use(process):
    # A plan tries other servers by a transfer only if it is asked to.
    reading = ("inspect", "ingest", "requests", "report", "generate", "predict", "compare", "export", "verify")
    commands = (*reading, "train", "replay", "plan", "candidates")
    load = "import sys, importlib; [importlib.import_module(f'tracefit.commands.{v}') for v in sys.argv[1:]]"
    done = process(*commands, code=f"{load}; print(sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert "'tracefit.commands.inspect'" in done.stdout
    assert "'sklearn'" not in done.stdout
    assert "'scipy'" not in done.stdout


@pytest.mark.slow
def test_an_ingest_waits_for_nothing_that_uses_models(process):
    done = process(code="import sys, tracefit.commands.ingest; print(sorted(sys.modules))")
    assert "'tracefit.commands.ingest'" in done.stdout
    assert not [name for name in ("'narwhals'", "'tracefit.coefficients.documents'") if name in done.stdout]


def test_the_commands_are_there_on_first_use():
    # Rooms have these names; replaying has one of its own.
    rooms = {"receive", "synth", "features", "replay"}
    assert {*COMMANDS, "load", "Models", "TrainOptions", "replay_runs"} - rooms <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = package.trian


def test_the_module_is_a_command_too(process):
    done = process(
        code="import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('tracefit.cli', run_name='__main__')"
    )
    assert done.stdout.startswith("tracefit ")
    assert sys.executable
