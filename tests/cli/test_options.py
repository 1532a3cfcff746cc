"""Options by flag, environment and configuration file; what is wrong with them is one line that suggests."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from typer.main import get_command

import tracefit
import tracefit.options
import tracefit.receive.options
import tracefit.synth.options
from tracefit.cli import app, commands
from tracefit.commands.generate import generate
from tracefit.commands.receive import receive
from tracefit.errors import UsageError, did_you_mean, naming_flags
from tracefit.options import (
    IngestOptions,
    LoadOptions,
    OptionFlag,
    RunOption,
    ServerOptions,
    TrainOptions,
    flag_of,
    from_flags,
    named,
    options_of,
)
from tracefit.synth import SynthOptions
from tracefit.synth.options import surge_phases


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a configuration file."""

    def write(text):
        path = tmp_path / "tracefit.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def names_of(tracefit):
    """Return a function from arguments of `features` to the sets it lists."""

    def names(*arguments):
        code, out, _ = tracefit(*arguments, "--json")
        assert code == 0
        return [one["name"] for one in json.loads(out)]

    return names


@pytest.fixture
def generated(tracefit, tmp_path):
    """Return a function from arguments of `synth` to the requests it generated; few unless they say otherwise."""

    def requests(*arguments):
        code, out, err = tracefit(*arguments, "--out", tmp_path / "runs", "--json")
        assert (code, err) == (0, "")
        return json.loads(out)["requests"]

    return requests


def test_a_flag_wins_over_the_environment_and_that_over_the_file(generated, config, monkeypatch):
    path = config("[synth]\nrequests = 3\n")
    assert generated("--config", path, "synth") == 3
    monkeypatch.setenv("TRACEFIT_REQUESTS", "4")
    assert generated("--config", path, "synth") == 4
    assert generated("--config", path, "synth", "--requests", 5) == 5


def test_file_is_named_before_after_or_in_the_environment(generated, config, monkeypatch):
    path = config("requests = 3\n")
    assert generated("synth", "--config", path) == 3
    monkeypatch.setenv("TRACEFIT_CONFIG", str(path))
    assert generated("synth") == 3


def test_a_commands_own_section_wins_over_what_is_for_all(generated, config):
    assert generated("synth", "--config", config("requests = 3\n[synth]\nrequests = 2\n")) == 2
    assert generated("synth", "--config", config("requests = 3\n[train]\nfeatures = 'batch'\n")) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        'set = ["max_num_seqs=17", "enforce_eager=true"]',
        "[inspect.set]\nmax_num_seqs = 17\nenforce_eager = true",
    ],
    ids=["list", "table"],
)
def test_list_or_table_sets_a_repeatable_option(tracefit, tmp_path, traces, config, text):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    _, by_file, err = tracefit("inspect", folder, "--config", config(text), "--json")
    flags = ("--set", "max_num_seqs=17", "--set", "enforce_eager=true")
    _, by_flags, _ = tracefit("inspect", folder, *flags, "--json")
    deployments = [json.loads(out)["deployments"][0]["deployment_id"] for out in (by_file, by_flags)]
    assert err == ""
    assert deployments[0] == deployments[1]


WRONG_FILES = {
    "a near miss": ("beta_target = 'clock'\n", "beta_target: no such option; did you mean beta-target?"),
    "in a section": ("[synth]\nreqests = 3\n", "[synth] reqests: no such option; did you mean requests?"),
    "of another command": ("[train]\nrequests = 3\n", "[train] requests: no such option"),
    "a misspelt command": ("[trian]\nfeatures = 'batch'\n", "trian: no such option; did you mean train?"),
    "not TOML": ("requests = \n", "is not TOML"),
    "brackets without end": ("requests = " + 20_000 * "[", "nested too deeply"),
    "deep brackets": ("requests = " + 300 * "[" + 300 * "]", "invalid value for '--requests'"),
    "a number of thousands of digits": ("requests = " + 5_000 * "1", "is not TOML"),
    "too large": ("# " + 70_000 * "x", "is larger than 65,536 bytes"),
    "the file itself": ("config = 'other.toml'\n", "config: no such option"),
    "a value of another kind": ("[synth]\nrequests = 'many'\n", "invalid value for '--requests'"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_what_is_wrong_in_the_file_is_one_line_that_names_it(tracefit, tmp_path, config, case):
    text, says = WRONG_FILES[case]
    path = config(text)
    code, out, err = tracefit("synth", "--out", tmp_path / "runs", "--config", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"tracefit: {path}: ")
    assert says in err
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_is_one_line(tracefit, tmp_path):
    code, _, err = tracefit("features", "--config", tmp_path / "none.toml")
    assert (code, err) == (
        2,
        f"tracefit: {tmp_path / 'none.toml'}: no such file or directory; check the path\n",
    )


def test_a_wrong_variable_is_named(tracefit, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEFIT_REQUESTS", "many")
    code, _, err = tracefit("synth", "--out", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("tracefit: TRACEFIT_REQUESTS: invalid value for '--requests'")


def test_a_variable_nobody_listens_to_is_a_warning(tracefit, monkeypatch):
    monkeypatch.setenv("TRACEFIT_REQESTS", "3")
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_SAMPLE_RATE", "1")  # for the plugin of vLLM
    code, out, err = tracefit("features", "batch")
    assert code == 0
    assert out
    said = "TRACEFIT_REQESTS is set, but there is no such option; did you mean TRACEFIT_REQUESTS?"
    assert err == f"warning: {said}\n"


COMMANDS = get_command(app).commands
DECLARED = [
    pytest.param(function, flag, default, id=f"{name}-{flag.argument}")
    for name, function in vars(commands).items()
    if name in COMMANDS
    for flag, default in (
        (getattr(p.annotation, "__metadata__", [None])[0], p.default)
        for p in inspect.signature(function, eval_str=True).parameters.values()
    )
    if isinstance(flag, OptionFlag) and flag.argument
]
FUNCTIONS = {
    "predict": (tracefit.predict, tracefit.Models.predict_step, tracefit.Models.predict_request),
    "replay": (tracefit.replay_runs,),
    "receive": (receive,),
    "synth": (generate, surge_phases),
}


@pytest.mark.parametrize(("function", "flag", "default"), DECLARED)
def test_an_option_is_an_argument_of_its_function(function, flag, default):
    name = function.__name__
    functions = FUNCTIONS.get(name) or (getattr(tracefit, name),)
    found = [p for f in functions if (p := inspect.signature(f).parameters.get(flag.argument))]
    assert found, "no function has this argument"
    assert default is None or {p.default for p in found} <= {default, 0}


@pytest.mark.parametrize("kind", [ServerOptions, IngestOptions, TrainOptions, LoadOptions, SynthOptions])
def test_a_field_is_declared_with_its_help(kind):
    assert all(flag.help for flag, _ in options_of(kind).values())
    values = dict.fromkeys(options_of(kind))
    assert from_flags(kind, values) == kind()


PACKAGE = Path(tracefit.__file__).parent
DECLARING = ("options.py", "receive/options.py", "synth/options.py", "cli/commands.py", "cli/program.py")
OF_OTHERS = ("coefficients/recording.py", "inputs/unread.py", "recordings/clients/guidellm_csv.py")
"""Modules that write command lines of other programs: of load generators, and of those whose files are not read."""


def texts_of(path):
    """Yield the texts of a module with their lines, without its docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documents = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.lineno, node.value


@pytest.mark.slow
def test_texts_name_options_by_their_declaration():
    flags = {
        text
        for command in COMMANDS.values()
        for p in command.params
        for text in p.opts
        if p.name not in {"json", "quiet", "config", "log_level"}
    }
    written = {
        (str(path.relative_to(PACKAGE)), flag)
        for path in PACKAGE.rglob("*.py")
        for _, text in texts_of(path)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
        if flag in flags and str(path.relative_to(PACKAGE)) not in (*DECLARING, *OF_OTHERS)
    }
    assert written == set()


MODULES = (tracefit.options, tracefit.receive.options, tracefit.synth.options)
DECLARATIONS = [
    (value, name)
    for module in MODULES
    for value in vars(module).values()
    for name in (
        options_of(value)
        if is_dataclass(value) and isinstance(value, type)
        else [""] * any(getattr(one, "argument", "") for one in getattr(value, "__metadata__", ()))
    )
]
"""Every alias of an option, and every class of options with its fields."""


@cache
def flags_of(name):
    """Return the flags of a command, and those before the name of any."""
    return {text for one in (COMMANDS[name], get_command(app)) for p in one.params for text in p.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_text_of_a_command_names_its_options_or_the_command_that_has_them(command):
    """Every hint names options by `named`: whatever it names, the running command has the flag, or the text says which
    one has."""
    assert len(DECLARATIONS) > 100
    with naming_flags(flags=get_command(app).owners(command)):
        texts = [named(declared, name) for declared, name in DECLARATIONS]
    for text in texts:
        flag, _, owner = text.partition(" of `tracefit ")
        assert not flag.startswith("--") or flag in flags_of(owner.rstrip("`") or command), text
    assert not any(" of `tracefit " in text for text in texts if text in flags_of(command))


def test_a_command_is_known_once_its_line_is_read(tracefit, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise UsageError(f"{named(ServerOptions, 'gpu')}, {named(RunOption)}")

    monkeypatch.setattr("tracefit.export", refuse)
    monkeypatch.setattr("tracefit.inspect", refuse)
    _, _, err = tracefit("export", tmp_path, "--to", "csv", "--out", tmp_path)
    assert err == "tracefit: --gpu of `tracefit run`, --run\n"
    _, _, err = tracefit("inspect", tmp_path)
    assert err.startswith("tracefit: --gpu, --run of `tracefit ")
    assert named(ServerOptions, "gpu") == "`ServerOptions.gpu`"


def written_commands():
    """Yield the texts of the package with the flags that `flag_of` gives, and their places."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("tracefit", *path.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) and "flag_of(" in ast.unparse(node):
                yield f"{path.name}:{node.lineno}", "".join(map(partial(written, module), node.values))


def written(module, part):
    """Return a part of a text: as it is, a flag, or X for another value."""
    if isinstance(part, ast.Constant):
        return part.value
    match part.value:
        case ast.Call(func=ast.Name(id="flag_of"), args=[ast.Name(id=declared), *name]):
            return flag_of(getattr(importlib.import_module(module), declared), *(n.value for n in name))
    return "X"


@pytest.mark.slow
def test_a_command_in_a_text_has_the_flags_it_is_written_with():
    found = list(written_commands())
    assert len(found) > 5
    for place, text in found:
        commands_in = re.findall(r"`tracefit ([a-z]+)([^`]*)`", text)
        named_flags = [(name, flag) for name, rest in commands_in for flag in re.findall(r"--[a-z-]+", rest)]
        assert named_flags, f"{place}: a flag without its command"
        assert [each for each in named_flags if each[1] not in flags_of(each[0])] == [], place


@pytest.mark.slow
def test_no_option_is_named_before_it_is_known_who_reads():
    early = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for path in PACKAGE.rglob("*.py")
        for statement in ast.parse(path.read_text()).body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {"named", "either"}
    ]
    assert early == []


MISTYPED = {
    ("rnu", "x"): "no such command 'rnu'; did you mean 'run'?",
    ("run", "x", "--gpuu", "H100"): "no such option: --gpuu; did you mean --gpu?",
    (
        "run",
        "x",
        "--out",
        "y",
        "--set",
        "max_num_seq=3",
    ): "--set max_num_seq: no such setting; did you mean max_num_seqs?",
    ("features", "bacth"): "feature set 'bacth' is not known; did you mean batch?",
    ("train", "x", "--out", "y", "--beta-target", "clok"): "'clok' is not one of 'auto', 'clock', 'duration'",
    ("export", "x", "--to", "bliss", "--out", "y"): "consumer bliss is not known; did you mean blis?",
    (
        "features",
        "--log-level",
        "loud",
    ): "invalid value for '--log-level': 'loud' is not one of 'debug', 'info'",
    ("train", "x"): "missing option '--out'; see `tracefit train --help`",
    ("synth", "--out", "x", "--step-sampling", "2"): "invalid value for '--step-sampling'",
}


@pytest.mark.parametrize("arguments", MISTYPED)
def test_mistyped_words_are_one_line_with_what_may_be_meant(tracefit, arguments):
    code, out, err = tracefit(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("tracefit: ")
    assert MISTYPED[arguments] in err


NOT_A_VALUE = {
    "a timestamp tag": "!!timestamp x",
    "an integer tag": '!!int ""',
    "a truth tag": "!!bool x",
    "a float tag": "!!float ''",
    "half a million hexadecimal digits": "0x" + "f" * 500_000,
    "many binary digits": "0b1" + "1" * 20_000,
    "many digits": "9" * 5000,
    "hexadecimal without digits": "0x_",
    "an impossible date": "2020-13-45",
    "deep nesting": "[" * 2000 + "]" * 2000,
    "an alias of itself": "&a [*a]",
}


@pytest.mark.parametrize("key", ["max_num_seqs", "note"])
@pytest.mark.parametrize("value", NOT_A_VALUE.values(), ids=NOT_A_VALUE)
def test_value_yaml_cannot_hold_is_refused_in_one_line(tracefit, tmp_path, traces, key, value):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    code, out, err = tracefit("inspect", folder, "--set", f"{key}={value}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"tracefit: --set {key}: ")
    assert len(err) < 200

    (folder / "exp-config.yaml").write_text(f"{key}: {value}\n")
    code, out, err = tracefit("inspect", folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "exp-config.yaml: " in err


@pytest.mark.slow
def test_a_mistyped_gpu_suggests_one(tracefit, tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    _, _, err = tracefit("inspect", folder, "--gpu", "H1000")
    assert "GPU 'H1000' is not known: features of the GPU are left out (did you mean H100-SXM" in err


@pytest.mark.slow
def test_a_setting_of_its_own_is_not_a_typo(tracefit, tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    _, out, err = tracefit("inspect", folder, "--set", "swap_space=4", "--json")
    assert err.startswith("warning: --set swap_space: unknown setting")
    assert json.loads(out)["runs"]


def test_names_that_are_not_close_are_not_suggested():
    assert did_you_mean("zebra", ["batch", "roofline"]) is None
    assert did_you_mean("rooflin", ["batch", "roofline"]) == "did you mean roofline?"
    assert did_you_mean("llm-d", ["vllm-vcr", "llm-d-sim", "llm-d-x"]) == "did you mean llm-d-sim or llm-d-x?"


LOGS = {
    "debug": {"info: reading run", "debug: "},
    "info": {"info: reading run"},
    "warning": {"warning: run: 7 events were dropped by the server's SDK"},
    "error": set(),
}


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("level", LOGS)
def test_logs_go_to_stderr_by_their_level(tracefit, tmp_path, traces, level):
    traces.request(1, 0, step=1).steps(traces.summary(1, 1000), dropped=7)
    folder = traces.write(tmp_path / "run")
    _, out, err = tracefit("inspect", folder, "--log-level", level, "--json")
    assert json.loads(out)
    assert all(any(line.startswith(said) for line in err.splitlines()) for said in LOGS[level])
    levels = ("debug", "info", "warning", "error")
    below = levels[: levels.index(level)]
    assert not any(line.startswith(f"{name}: ") for line in err.splitlines() for name in below)


def test_every_option_but_a_few_has_a_variable_of_its_name():
    group = get_command(app)
    for command in group.commands.values():
        for option in (p for p in command.params if p.param_type_name == "option"):
            long = max(option.opts, key=len)
            assert option.envvar == "TRACEFIT_" + long.strip("-").replace("-", "_").upper()


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(process, monkeypatch, shell):
    for name, value in {
        "_TRACEFIT_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "tracefit run --beta",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "tracefit run --beta",
        "COMP_CWORD": "2",
    }.items():
        monkeypatch.setenv(name, value)
    done = process(code="import sys; sys.argv[0] = 'tracefit'; from tracefit.cli import main; main()")
    assert "--beta-target" in done.stdout
