"""Reading and writing: same content, same bytes; hostile content, one line that names the file."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from tracefit.coefficients.files import (
    MAX_FILE_BYTES,
    read_coefficients,
    read_evaluation,
    rounded,
    to_json,
)
from tracefit.errors import UsageError

MODEL = {
    "name": "beta.cycle_time",
    "form": "linear",
    "intercept": {"value": 7408.99},
    "terms": [{"feature": "prefill_tokens", "unit": "us/token", "value": 26.59}],
}
FILE = {"schema": "tracefit/coefficients", "version": 4, "kind": "beta", "models": [MODEL]}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file and returns its path."""

    def to_file(content):
        path = tmp_path / "beta.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


def _refused(path, read=read_coefficients):
    with pytest.raises(UsageError) as caught:
        read(path)
    line = caught.value.line()
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert len(line) < 1000
    return line


def test_file_without_optional_keys_is_read(write):
    file = read_coefficients(write(FILE))
    assert (file.kind, file.models[0].intercept.value, file.models[0].terms[0].value) == (
        "beta",
        7408.99,
        26.59,
    )


def test_written_file_is_read_unchanged(write, trained):
    for name in ("alpha", "beta"):
        text = (trained / "models" / f"{name}.json").read_text()
        assert to_json(read_coefficients(write(text))) == text
    text = (trained / "evaluation.json").read_text()
    assert to_json(read_evaluation(write(text))) == text


def test_a_byte_order_mark_does_no_harm(write):
    assert read_coefficients(write(b"\xef\xbb\xbf" + json.dumps(FILE).encode())).kind == "beta"


def test_keys_are_in_declared_order(write):
    text = to_json(read_coefficients(write(dict(reversed(FILE.items())))))
    assert list(json.loads(text))[:4] == ["schema", "version", "kind", "models"]
    assert text.endswith("}\n")


@pytest.mark.parametrize(
    ("value", "kept"),
    [(1 / 3, 0.333333333), (123456789.123, 123456789.0), (1e-9 / 3, 3.33333333e-10), (0.0, 0.0)],
)
def test_numbers_keep_nine_digits(value, kept):
    assert rounded(value) == kept


@pytest.mark.parametrize(
    ("ends", "written"),
    [
        ((1.165084436, 113.71923228448), [1.16508443, 113.719233]),
        ((-1.0000000004, 1e-9 / 3), [-1.00000001, 3.33333334e-10]),
        ((1.1, 352.0), [1.1, 352.0]),
    ],
)
def test_a_range_is_rounded_outwards(write, ends, written):
    document = json.loads(json.dumps(FILE))
    document["models"][0]["terms"][0]["training_range"] = ends
    (model,) = json.loads(to_json(read_coefficients(write(document))))["models"]
    assert model["terms"][0]["training_range"] == written
    assert written[0] <= ends[0]
    assert written[1] >= ends[1]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("version",), 5, "version"),
        (("version",), "1", "version"),
        (("schema",), "something/else", "schema"),
        (("kind",), "gamma", "kind"),
        (("surprise",), 1, "surprise"),
        (("models",), {}, "models"),
        (("models", 0, "surprise"), 1, "surprise"),
        (("models", 0, "form"), "cubic", "form"),
        (("models", 0, "intercept"), None, "intercept"),
        (("models", 0, "intercept", "value"), "much", "intercept.value"),
        (("models", 0, "intercept", "value"), None, "intercept.value"),
        (("models", 0, "intercept", "value"), 10**400, "intercept.value"),
        (("models", 0, "terms", 0, "feature"), "a b; c", "feature"),
        (("models", 0, "terms", 0, "feature"), "x" * 5000, "feature"),
        (("models", 0, "terms", 0, "training_range"), [1, 2, 3], "training_range"),
        (("x" * 5000,), 1, "xxx"),
    ],
)
def test_part_of_another_shape_is_named(write, place, value, says):
    document = json.loads(json.dumps(FILE))
    part = document
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    line = _refused(write(document))
    assert says in line
    assert "schemas/coefficients.schema.json" in line


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_number_that_is_not_finite_is_refused(write, number):
    _refused(write(json.dumps(FILE).replace("26.59", number)))


def test_repeated_key_is_refused(write):
    text = json.dumps(FILE).replace('"value": 26.59', '"value": 26.59, "value": 1.0')
    assert "twice" in _refused(write(text))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '"text"',
        b"\x00\xff\xfe\x00",
        b"\x28\xb5\x2f\xfd\x04\x00",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"schema": 1' + "0" * 5000 + "}",
        '{"kind": "\\ud800"}',
    ],
    ids=range(12),
)
def test_error_of_another_file_is_one_line(write, content):
    path = write(content)
    _refused(path)
    _refused(path, read_evaluation)


def test_missing_file_and_folder_are_refused(tmp_path):
    _refused(tmp_path / "missing.json")
    _refused(tmp_path)


def test_too_large_file_is_not_read(write):
    path = write(FILE)
    with path.open("ab") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "larger than" in _refused(path)


DAMAGE = [
    ((("intercept", "ci95"), [0.0, 1.0]), "ci95"),
    ((("terms", 0, "ci95"), [27.0, 26.0]), "ci95"),
    ((("terms", 0, "training_range"), [2.0, 1.0]), "training_range"),
    ((("terms",), [MODEL["terms"][0]] * 2), "two terms"),
    ((("terms", 0, "formula"), "x" * 401), "formula"),
    ((("definitions",), {"a b": "1"}), "definitions"),
    ((("definitions",), {"a": "x" * 401}), "definitions"),
]


@pytest.mark.parametrize(("change", "says"), DAMAGE)
def test_contradicting_numbers_are_refused(write, change, says):
    document = json.loads(json.dumps(FILE))
    place, value = change
    part = document["models"][0]
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    assert says in _refused(write(document))


def test_repeated_model_is_refused(write):
    assert "two models" in _refused(write(FILE | {"models": [MODEL, MODEL]}))


@pytest.mark.parametrize("version", [0, 1, 2, 5, "3", 3.0, True, None, "v" * 10_000])
def test_another_version_says_which_one_is_read(write, version):
    assert "is not 3 or 4, which this tracefit reads" in _refused(write(FILE | {"version": version}))


def test_models_of_version_3_are_fitted(write):
    """Version 4 says where the numbers of a model come from; before it, all were fitted to traces of their
    deployment."""
    file = read_coefficients(write(FILE | {"version": 3}))
    assert file.models[0].origin == "fitted"
    computed = MODEL | {"origin": "transferred"}
    assert read_coefficients(write(FILE | {"models": [computed]})).models[0].origin == "transferred"
    assert "origin" in _refused(write(FILE | {"models": [MODEL | {"origin": "guessed"}]}))


HUGE = {
    "terms": lambda n: json.dumps(FILE | {"models": [MODEL | {"terms": MODEL["terms"] * n}]}, separators=(",", ":")),
    "models": lambda n: json.dumps(FILE | {"models": [0] * n}),
    "empty objects": lambda n: '{"models": [' + "{}" * n,
    "nesting behind text": lambda n: '{"a": "\\"' + "[" * n,
    "an open string of escapes": lambda n: '{"a": "' + '\\"' * (4 * n),
    "a long string": lambda n: json.dumps(FILE | {"kind": "x" * (10 * n)}),
}
"""Parts of a file repeated a million times, or as long."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_a_huge_file_is_refused_in_little_memory(write, name):
    path = write(HUGE[name](1_000_000))
    tracemalloc.start()
    line = _refused(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any(text in line for text in ("larger than", "values", "nested", "JSON", "models", "kind"))
    assert peak < 200e6


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_a_larger_file_is_refused_in_as_much_more_time(write, grows_linearly, name):
    def prepare(n):
        path = write(HUGE[name](n))
        return lambda: _refused(path)

    grows_linearly(prepare, 2_000)


def test_a_thousand_and_one_terms_are_refused(write):
    terms = [MODEL["terms"][0] | {"feature": f"f{i}"} for i in range(1001)]
    assert "terms" in _refused(write(FILE | {"models": [MODEL | {"terms": terms}]}))


def test_an_evaluation_is_no_coefficient_file(trained):
    _refused(trained / "evaluation.json")
    assert "evaluation.schema.json" in _refused(trained / "models" / "beta.json", read_evaluation)
