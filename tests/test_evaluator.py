"""`tracefit/evaluator.py`, which users copy: alone with the standard library, and equal to the library on every
model."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapes import shapes_of
from tracefit import evaluator
from tracefit.coefficients.documents import CoefficientFile
from tracefit.coefficients.files import read_coefficients
from tracefit.errors import UsageError
from tracefit.models.amounts import known, number
from tracefit.models.evaluate import CompiledModel
from tracefit.models.formulas import computation, parse_formula
from tracefit.models.frames import predict_rows
from tracefit.models.predict import predict_row

ROOT = Path(__file__).parents[1]
FILES = [ROOT / of / f"{kind}.json" for of in ("models", "fixtures/models") for kind in ("alpha", "beta")]
MODELS = [
    pytest.param(path, index, id=f"{path.parent.relative_to(ROOT)}-{m['deployment_id'][:12]}-{m['name']}")
    for path in FILES
    for index, m in enumerate(json.loads(path.read_text())["models"])
]


def _random_inputs(names, rng):
    """Return values from 0 to large ones; now and then one is unknown."""
    scales = (0.0, 1.0, 10.0, 1e3, 1e5)
    return {n: None if rng.random() < 0.03 else rng.random() * rng.choice(scales) for n in names}


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("path", "index"), MODELS)
def test_every_published_model_is_evaluated_as_the_library_does(path, index):
    plain = json.loads(path.read_text())["models"][index]
    model = read_coefficients(path).models[index]
    rng, names = random.Random(index), sorted(CompiledModel(model).inputs)
    inputs = [_random_inputs(names, rng) for _ in range(300)]
    # A constant reads no column: the number of a row makes it one.
    numbered = [{"row": n, **row} for n, row in enumerate(inputs)]
    rows = pl.DataFrame(numbered, schema={"row": pl.Int64, **dict.fromkeys(names, pl.Float64)})
    wanted = predict_rows(model, rows)["predicted_us"].to_list()
    found = [evaluator.predict(plain, features) for features in inputs]
    assert found == [None if value is None else pytest.approx(value, rel=1e-12) for value in wanted]
    assert sum(value is not None for value in wanted) > 100


BOUNDARY = {
    "form": "boundary",
    "boundary": "step_start",
    "work": {"intercept": {"value": 1400.0}, "terms": [{"feature": "prompt_tokens", "value": 0.4}]},
    "offset": {"value": -30.0},
    "without_clock": {"intercept": {"value": 9315.0}, "terms": []},
}


@pytest.mark.parametrize(
    ("starts", "expected"),
    [((500, 1439, 9000, 18_000), 8970), ((500, 1440, 9000), 1410), ((), 1440), (None, 9315)],
)
def test_a_boundary_is_the_first_step_start_after_the_work(starts, expected):
    """The work of 100 prompt tokens is 1,400 + 40 us; without step starts the line for that is used."""
    assert evaluator.predict(BOUNDARY, {"prompt_tokens": 100}, starts) == expected


@pytest.mark.parametrize(("queue", "expected"), [("one_at_a_time", 8970), (None, 1410)])
def test_work_on_earlier_requests_comes_first(queue, expected):
    """1,440 us of its own and 600 us of those before: past the start at 1,440, the one at 9,000 is next."""
    model = {**BOUNDARY, "queue": queue}
    assert evaluator.predict(model, {"prompt_tokens": 100}, (500, 1440, 9000), api_wait_us=600) == expected


FORMULAS = [
    "a + b * c - 2 / a",
    "-a ** 2 + 0.5 ** b",
    "max(a, b, 3) - min(a * b, c / (a - a))",
    "a / (b - b)",
    "(0 - a) ** 0.5",
    "a ** -2",
    "1e300 ** 4 * a",
    "2 \u00d7 a \u00b7 b \u2212 c \u00f7 4",
    "max(0, (a * 1e200) ** 3)",
    "min(0, (0 - a * 1e200) ** 3)",
    "--a - +b",
    "(+0.5) ** b",
    "1 / ((0 - a * 1e300 * 1e300) ** 0.5)",
]


def _term(text, value=1):
    term = {"feature": "f", "unit": "us", "value": value, "formula": text}
    return {"form": "linear", "intercept": {"value": 0}, "terms": [term]}


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_computed_as_in_the_library(text):
    node, rng = parse_formula(text, where="test"), random.Random(text)
    for _ in range(50):
        values = {n: rng.choice([0.0, rng.random() * 10, -rng.random(), None]) for n in "abc"}
        # A prediction is not below 0: the value is one of two, and the other is 0.
        above, below = (evaluator.predict(_term(text, sign), values) for sign in (1, -1))
        wanted = known(computation(node)({name: number(name, value) for name, value in values.items()}))
        if wanted is None:
            assert above is below is None, values
        else:
            assert above - below == pytest.approx(wanted, rel=1e-12), values


REFUSED = [
    "__import__('os')",
    "a.b",
    "[a]",
    "a if a else b",
    "f(a)",
    "a // b",
    "'a'",
    "a < b",
    "a ** 9",
    "a ** b",
    "a ** - -2",
    "-(not a)",
    "a ** (not 2)",
    "(-0.5) ** b",
    "0x1f",
    "1_000",
    "True",
    "1e999",
    "1" * 350,
    "max(a, key=b)",
    "max()",
    "max(*a)",
    "max(max(max(max(max(a)))))",
    "+".join("a" * 250),
    "+".join("a" * 100_000),
    "(" * 190 + "a" + ")" * 190 + "+",
    " ",
]


@pytest.mark.parametrize("text", REFUSED)
def test_formula_that_the_library_refuses_is_refused(text):
    with pytest.raises(UsageError):
        parse_formula(text, where="test")
    with pytest.raises(ValueError, match="formula"):
        evaluator.predict(_term(text), {"a": 1.0, "b": 2.0})


def _regimes(when):
    free = {"when": {"all": []}, "intercept": {"value": 1.0}, "terms": []}
    return {"form": "regimes", "regimes": [{"when": when, "intercept": {"value": 2.0}, "terms": []}, free]}


X = {"feature": "x", "op": ">", "value": 0}


@pytest.mark.parametrize(
    ("when", "x", "expected"),
    [
        ({"any": []}, 1, 1),
        ({"all": []}, 1, 2),
        ({"any": [X]}, None, 1),
        ({"any": [X]}, float("nan"), 1),
        ({"any": [X]}, 1, 2),
        ({"all": [X]}, 0, 1),
    ],
)
def test_conditions_follow_the_contract(when, x, expected):
    assert evaluator.predict(_regimes(when), {"x": x}) == expected


Z = {"feature": "z", "op": ">", "value": 0}


@pytest.mark.parametrize(
    ("when", "features", "missing"),
    [({"any": [X]}, {}, "x"), ({"any": [X, Z]}, {"x": 5}, "z"), ({"all": [X, Z]}, {"x": -5}, "z")],
)
def test_missing_name_is_an_error_that_names_it(when, features, missing):
    """Whichever comparison decides: the same as in the library."""
    with pytest.raises(KeyError, match=missing):
        evaluator.predict(_regimes(when), features)


def test_circle_of_definitions_is_refused():
    circle = {"form": "linear", "intercept": {"value": 0}, "terms": [{"feature": "a", "value": 1}]}
    with pytest.raises(ValueError, match="a is defined by itself"):
        evaluator.predict({**circle, "definitions": {"a": "b", "b": "a"}}, {})


def _chain(length):
    """Return a file in which d0 = d1 + 1, d1 = d2 + 1, …, and the last one is x."""
    definitions = {f"d{n}": f"d{n + 1} + 1" for n in range(length - 1)} | {f"d{length - 1}": "x"}
    terms = [{"feature": "d0", "unit": "us", "value": 2.0}]
    return _file({"form": "linear", "intercept": {"value": 1.0}, "terms": terms, "definitions": definitions})


def _file(model, **more):
    return {
        "schema": "tracefit/coefficients",
        "version": 4,
        "kind": "beta",
        "models": [{"name": "m", **model}],
        **more,
    }


def test_thousand_definitions_build_on_each_other(tmp_path):
    """Of 1,000 definitions, x passes 999 additions: 1 + 2 * (5 + 999)."""
    path = tmp_path / "beta.json"
    path.write_text(json.dumps(_chain(1000)))
    assert evaluator.predict(evaluator.load(path, "m"), {"x": 5}) == 2009
    assert predict_row(CompiledModel(read_coefficients(path).models[0]), {"x": 5}).interval.value_us == 2009
    path.write_text(json.dumps(_chain(1001)))
    with pytest.raises(UsageError, match="at most 1000 items"):
        read_coefficients(path)
    with pytest.raises(ValueError, match="definitions has more than 1,000 names"):
        evaluator.load(path, "m")


LINEAR = '{"form": "linear", "name": "m", "intercept": {"value": 1}, "terms": [%s]}'
A_TERM = '{"feature": "x", "unit": "us", "value": 1}'
FILE_OF = '{"schema": "tracefit/coefficients", "version": 4, "kind": "beta", "models": [%s]}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((FILE_OF % (LINEAR % A_TERM.replace("1", n)), "finite") for n in ("NaN", "-Infinity", "1e999", "9" * 400)),
        (FILE_OF % (LINEAR % A_TERM.replace("1", "true")), "finite"),
        (FILE_OF % (LINEAR % A_TERM.replace("}", ', "value": 2}')), "same key twice"),
        (FILE_OF % (LINEAR % f"{A_TERM}, {A_TERM}"), "two terms"),
        (FILE_OF % f"{LINEAR % A_TERM}, {LINEAR % A_TERM}", "two models"),
        (FILE_OF % (LINEAR % ", ".join(A_TERM.replace("x", f"x{n}") for n in range(1001))), "1,000"),
        (FILE_OF % ", ".join(["0"] * 10_001), "10,000"),
        (FILE_OF % ", ".join(["0"] * 500_001), "values"),
        (FILE_OF % ("[" * 100_000), "nested"),
        (FILE_OF % (LINEAR % A_TERM.replace("1", "9" * 5000)), "digits"),
        (FILE_OF % (" " * (16 << 20)), "larger"),
        ('{"schema": "tracefit/coefficients"', ""),
        ("[]", "coefficient file"),
    ],
)  # fmt: skip
def test_file_that_the_library_refuses_is_one_error(tmp_path, text, says):
    path = tmp_path / "beta.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_coefficients(path)
    with pytest.raises(ValueError, match=rf"beta\.json: .*{says}"):
        evaluator.load(path, "m")


FIXTURE = ROOT / "fixtures/models/beta.json"


def test_model_is_chosen_by_name_and_deployment():
    model = evaluator.load(FIXTURE, "beta.cycle_time", "llama-2-70b")
    assert model["deployment_id"].startswith("llama-2-70b")


@pytest.mark.parametrize(("name", "deployment"), [("beta.cycle_time", ""), ("beta.other", "llama-2-70b")])
def test_choice_of_no_or_several_models_is_refused(name, deployment):
    says = r"beta\.json: \d models, not one, .*; there are: beta\.cycle_time of "
    with pytest.raises(ValueError, match=says):
        evaluator.load(FIXTURE, name, deployment)


@pytest.mark.parametrize("version", [1, 2, 5])
def test_other_version_is_refused(tmp_path, version):
    path = tmp_path / "beta.json"
    path.write_text(json.dumps({"schema": "tracefit/coefficients", "version": version, "models": []}))
    with pytest.raises(ValueError, match="of version 3 or 4"):
        evaluator.load(path, "beta.cycle_time")


def test_file_needs_only_the_standard_library(tmp_path):
    shutil.copy(ROOT / "pipeline/tracefit/evaluator.py", tmp_path)
    code = (
        "import sys\nbefore = set(sys.modules)\nimport evaluator\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before} - {'evaluator'}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- both evaluators together, on files that anyone may have changed -------------------------------------


def test_the_shapes_are_those_of_the_schema():
    """`python tests/shapes.py` prints them."""
    assert shapes_of(CoefficientFile.model_json_schema()) == evaluator.SHAPES


def _published(form):
    """Return the kind and the shortest published model of a form, with a validation and the most kinds of keys."""
    found = [
        (document["kind"], model)
        for document in map(json.loads, (path.read_text() for path in FILES))
        for model in document["models"]
        if model["form"] == form and model.get("validation") and evaluator._terms_of(model)
    ]
    return min(found, key=lambda each: len(json.dumps(each)))


def _document(form):
    kind, model = _published(form)
    own = json.loads(next(path for path in FILES if path.stem == "alpha").read_text())
    others = {"not_fitted": [{"name": "n", "deployment_id": "d", "reason": "r", "remedy": None}]}
    document = {**own, "kind": kind, "models": [model], **others, "requests": own["requests"][:1]}
    return json.loads(json.dumps(document))


REPLACEMENTS = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2,
        5.0,
        0.5,
        1e300,
        10**400,
        "5",
        "",
        "us",
        "ms",
        "x y",
        "linear",
        "alpha.m",
        "beta.m",
    ),
    *(
        "\ud800",
        "x" * 201,
        "x" * 401,
        "x + 1",
        [],
        [1],
        [2, 1],
        [None, 1],
        [1, 2, 3],
        {},
        {"x": 1},
        {"value": 1.0},
    ),
)


def _mutated(document):
    """Yield a document with each of many changes, one at a time, and the place of the change.

    In a list, only the first and the last item are changed.
    """

    def places(value, place):
        inner = (
            list(value.items())
            if isinstance(value, dict)
            else list(enumerate(value))
            if isinstance(value, list)
            else []
        )
        for key, item in inner if isinstance(value, dict) else [*inner[:1], *inner[1:][-1:]]:
            yield value, key, f"{place}.{key}"
            yield from places(item, f"{place}.{key}")

    for holder, key, place in places(document, ""):
        before = holder[key]
        for value in REPLACEMENTS:
            holder[key] = value
            yield document, f"{place} = {value!r:.20}"
        holder[key] = before
        if isinstance(holder, dict):
            order = list(holder.items())
            del holder[key]
            yield document, f"without {place}"
            holder["_" + key] = before
            yield document, f"{place} renamed"
            holder.clear()
            holder.update(order)
        else:
            holder.insert(key, before)
            yield document, f"{place} twice"
            del holder[key]
            del holder[key]
            yield document, f"without {place}"
            holder.insert(key, before)


MORE = float(os.environ.get("CHANGED_SHARE", "0.05"))
"""Part of all changes that the slow test tries; `make fuzz` tries every one."""


@pytest.mark.parametrize(
    ("share", "at_least"),
    [pytest.param(0.006, 3, id="some"), pytest.param(MORE, 25, id="more", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("form", ["linear", "regimes", "boundary"])
def test_a_changed_file_is_refused_by_both_or_predicts_the_same(tmp_path, form, share, at_least):
    document, path, rng = _document(form), tmp_path / "file.json", random.Random(1)
    model_name = document["models"][0]["name"]
    path.write_text(json.dumps(document))
    names = sorted(CompiledModel(read_coefficients(path).models[0]).inputs)
    features = {name: 1.0 + 7 * number for number, name in enumerate(names)}
    outcomes = {"refused": 0, "same": 0}
    for changed, change in _mutated(document):
        if rng.random() > share:
            continue
        path.write_text(json.dumps(changed))
        try:
            compiled = CompiledModel(read_coefficients(path).models[0])
        except (UsageError, IndexError) as error:
            with pytest.raises(ValueError, match=r"file\.json: "):
                pytest.fail(f"{change}: {error}: {evaluator.load(path, model_name)}")
            outcomes["refused"] += 1
            continue
        plain = evaluator.load(path, compiled.model.name)
        wanted = _outcome(lambda compiled=compiled: predict_row(compiled, features).interval.value_us)
        assert _outcome(lambda plain=plain: evaluator.predict(plain, features)) == wanted, change
        outcomes["same"] += 1
    assert document == _document(form)
    assert min(outcomes.values()) > at_least


def _without_terms(model):
    del model["terms"]


def _without_a_term(model):
    del model["terms"][0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model["target"].update(unit="ms"), "unit"),
        (lambda model: model.update(name="alpha.cycle_time"), "kind beta"),
        (_without_terms, "terms"),
        (_without_a_term, "its errors are those of"),
        (lambda model: model["training"].update(rows="5"), "rows is not a whole number"),
        (lambda model: model["terms"][0].update(ci95=[1e9, 2e9]), "does not contain the value"),
        (lambda model: model["terms"][0].update(training_range=[2, 1]), "begins above its end"),
    ],
)
def test_a_model_that_is_not_as_published_is_refused_by_both(tmp_path, change, says):
    document, path = _document("linear"), tmp_path / "beta.json"
    document["kind"] = "beta"
    document["models"][0]["name"] = "beta.cycle_time"
    path.write_text(json.dumps(document))
    evaluator.load(path, "beta.cycle_time")
    change(document["models"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=says):
        evaluator.load(path, document["models"][0]["name"])
    with pytest.raises(UsageError, match=says):
        read_coefficients(path)


@pytest.mark.parametrize(("counted", "refused"), [(1, False), (0, False), (2, True)])
def test_terms_of_a_boundary_may_be_counted_without_its_work(tmp_path, counted, refused):
    """Version 0.1 counts the terms of the form without a clock only."""
    document, path = _document("boundary"), tmp_path / "alpha.json"
    model = document["models"][0]
    per_token = {**model["without_clock"]["terms"][0], "feature": "prompt_tokens"}
    model["work"]["terms"] = [{**per_token, "value": 0.5, "ci95": None}]
    model["validation"]["n_features"] = len(model["without_clock"]["terms"]) + counted
    path.write_text(json.dumps(document))
    for read in (read_coefficients, lambda path: evaluator.load(path, model["name"])):
        with pytest.raises((UsageError, ValueError), match="its errors are those of") if refused else nullcontext():
            read(path)


NAMES = st.sampled_from([*"abcx", "d0", "d1", "d2"])
CONSTANTS = st.sampled_from(["0", "1", "0.5", "2", "4", "5", "1e308", "1e999", "3.", "True"])
FORMULA = st.recursive(
    NAMES | CONSTANTS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "**", "//", "and"]), inner),
        st.builds("{}({})".format, st.sampled_from(["-", "+", "--", "not ", "-(not ", "+-("]), inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max", "abs"]), inner, inner),
        st.builds("{} ** {}".format, inner, st.sampled_from(["2", "-2", "+0.5", "- -2", "(not 2)", "b"])),
    ),
    max_leaves=6,
)
NUMBER = st.sampled_from([0, -1, 2.5, 1e6, 1e308, 2**53 + 1, -0.0]) | st.integers(-5, 5)
HOSTILE = st.sampled_from(
    [
        None,
        True,
        "5",
        "",
        math.nan,
        math.inf,
        10**400,
        "@1e999",
        [],
        {},
        [[]],
        {"value": 1},
        "x" * 201,
        "a.b",
        "a b",
    ]
)
COMPARISON = st.fixed_dictionaries({"feature": NAMES, "op": st.sampled_from(["<", "<=", ">", ">=", "=="])}).flatmap(
    lambda c: st.builds(lambda more: c | more, st.builds(dict, value=NUMBER) | st.builds(dict, feature2=NAMES))
)
SIDE = st.none() | st.lists(COMPARISON, max_size=2)
FITTED = st.builds(dict, value=NUMBER)
TERM = st.builds(dict, feature=NAMES, unit=st.just("us"), value=NUMBER, formula=st.none() | FORMULA)
LINE = {"intercept": FITTED, "terms": st.lists(TERM, max_size=3, unique_by=lambda term: term["feature"])}
ABOUT = {"name": st.just("m"), "definitions": st.dictionaries(NAMES, FORMULA, max_size=3)}
MODEL = st.one_of(
    st.builds(dict, form=st.just("linear"), **ABOUT, **LINE),
    st.builds(
        dict,
        form=st.just("regimes"),
        regimes=st.lists(
            st.builds(dict, name=st.sampled_from("rst"), when=st.builds(dict, any=SIDE, all=SIDE), **LINE), min_size=1, max_size=2
        ),
        **ABOUT,
    ),
    st.builds(
        dict,
        form=st.just("boundary"),
        boundary=st.just("step_start"),
        work=st.builds(dict, **LINE),
        offset=FITTED,
        without_clock=st.builds(dict, form=st.just("linear"), **LINE),
        **ABOUT,
    ),
)  # fmt: skip
VALUE = st.none() | NUMBER | st.sampled_from([math.nan, math.inf, -math.inf, True, 10**400, "5"])


def _places(value):
    """Return where something can be put in: each object or list of a document with each of its keys."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in _places(inner)]


@st.composite
def _files(draw):
    """Return the text of a file of one model, in which nothing, or one thing, is not as it should be."""
    document = {"schema": "tracefit/coefficients", "version": 4, "kind": "beta", "models": [draw(MODEL)]}
    harm = draw(st.sampled_from(["none", "none", "other", "unknown key", "lacking"]))
    holder, key = draw(st.sampled_from(_places(document)))
    if harm == "other":
        holder[key] = draw(HOSTILE | NUMBER)
    elif harm == "unknown key" and isinstance(holder, dict):
        holder["more"] = 1
    elif harm == "lacking":
        del holder[key]
    return json.dumps(document).replace('"@1e999"', "1e999")


def _outcome(predict):
    """Return a prediction, or `unknown`: an error that is foreseen, or None. Any other error fails the test."""
    try:
        value = predict()
    except (UsageError, KeyError):
        return "unknown"
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        return "unknown"
    return "unknown" if value is None else pytest.approx(value, rel=1e-12)


@pytest.fixture(scope="module")
def shared_tmp(tmp_path_factory):
    """Return a folder that all examples of a property write to."""
    return tmp_path_factory.mktemp("files")


@given(text=_files(), features=st.dictionaries(st.sampled_from("abcx"), VALUE), is_idle=st.booleans())
def test_the_evaluator_refuses_and_predicts_as_the_library(shared_tmp, text, features, is_idle):
    path = shared_tmp / "beta.json"
    path.write_text(text)
    features = dict.fromkeys("abc", 1.0) | features
    try:
        compiled = CompiledModel(next(iter(read_coefficients(path).models)))
    except (UsageError, StopIteration):
        with pytest.raises(ValueError, match=r"beta\.json: "):
            evaluator.load(path, "m")
        return
    model = evaluator.load(path, compiled.model.name)
    idle = {"batch": 0} if is_idle else {}
    wanted = _outcome(lambda: predict_row(compiled, features | idle).interval.value_us)
    found = _outcome(lambda: evaluator.predict(model, features, () if is_idle else None))
    assert found == wanted, (text, features)
