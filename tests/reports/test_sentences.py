"""Verdicts as sentences: worded from the numbers of the evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tracefit.coefficients.documents import Criterion, Verdict
from tracefit.coefficients.files import read_evaluation
from tracefit.coefficients.verdicts import machine_words
from tracefit.fit.results import Missing, Overload, SummedTime
from tracefit.reports.sentences import fraction, lead, least_exact, verdicts
from tracefit.results.plans import ServerCapacity
from tracefit.results.requests import RecordedLoad
from tracefit.text import percent, sentence


@pytest.fixture
def deployment(trained):
    return read_evaluation(trained / "evaluation.json").deployments[0]


def _with(deployment, holdout=None, **changes):
    """Return the deployment with a step model whose errors are 2.84 and 9.71 %, on 200 steps, and other changes to
    it."""
    entry = deployment.models["beta.cycle_time"]
    errors = replace(entry.holdout, **({"n": 200, "mdape_pct": 2.84, "p90_ape_pct": 9.71} | (holdout or {})))
    fresh = {"holdout": errors, "extrapolated_rows": 0, "prefill_reach_pct": None}
    return deployment.model_copy(
        update={
            "models": {**deployment.models, "beta.cycle_time": replace(entry, **(fresh | changes))},
            "overloaded": (),
            "summed_step_time": None,
            "load": None,
        }
    )


START = "Step times are typically within 2.8 % (nine in ten within 9.7 %), "


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, "measured on load like the load they were trained on"),
        ({"extrapolated_rows": 19}, "measured on load like the load they were trained on"),
        ({"extrapolated_rows": 50}, "but a quarter of the held-out load was never trained on"),
        ({"holdout": {"n": 49}}, "but only 49 held-out steps say so"),
    ],
)
def test_the_lead_is_the_error_and_its_main_limit(deployment, changes, limit):
    assert lead(_with(deployment, **changes)) == f"{START}{limit}."


def test_the_lead_warns_of_longer_prompts(deployment):
    assert "1.3 % of the prompt tokens" in lead(_with(deployment, prefill_reach_pct=1.32))


def test_the_lead_warns_of_an_overloaded_server(deployment):
    overloads = (Overload(run_id="r", reasons=("why",), trained_on=True),)
    overloaded = _with(deployment).model_copy(update={"overloaded": overloads})
    assert lead(overloaded) == f"{START}but they describe a server that was overloaded."


def test_the_server_changed_only_if_its_speed_did(deployment):
    """A bias of the model beyond chance is stated as that, and one below 3 % limits nothing."""
    summed = SummedTime(
        predicted_us=1.0,
        actual_us=1.0,
        bias_pct=-0.39,
        bias_2sd_pct=0.2,
        blocks=40,
        max_contribution_pct=0.0,
        speed_change_pct=-0.35,
        speed_change_2sd_pct=0.3,
    )

    def said(**changes):
        with_sum = _with(deployment).model_copy(update={"summed_step_time": replace(summed, **changes)})
        return lead(with_sum).removeprefix(START)

    assert said() == "measured on load like the load they were trained on."
    assert said(bias_pct=-9.6, bias_2sd_pct=8.3) == "but summed over time they are 9.6 % too low."
    assert said(bias_pct=8.2, speed_change_pct=-8.6, speed_change_2sd_pct=4.3, drifting=True) == (
        "but the server changed: steps of equal batches take 8.6 % shorter in the hold-out than before it (± 4.3 %)."
    )
    # Files before called a bias beyond chance a drift.
    assert "changed" not in said(drifting=True, speed_change_2sd_pct=None)


def test_without_a_model_of_step_times_the_lead_says_why(deployment):
    lost = Missing(name="beta.cycle_time", reason="no steps were traced")
    without = deployment.model_copy(update={"models": {}, "not_fitted": (lost,), "load": None})
    assert lead(without) == "There is no model of step times: no steps were traced."
    known = without.model_copy(
        update={"load": LOAD, "capacity": None, "not_fitted": (replace(lost, remedy="trace the steps"),)}
    )
    assert lead(known) == (
        "There is no model of step times: no steps were traced. Trace the steps. One server carried 6.8 requests/s "
        "over 30 s."
    )


LOAD = RecordedLoad(6.8, 27.2, 30.0, 100.0, 90.0, 40.0, 0.9, 0.6)
"""Four engines, each with 6.8 requests per second."""


@pytest.mark.parametrize(
    ("capacity", "needs"),
    [
        (34.01, "1 server is"),
        # 27.2 is a little more than four fifths of it.
        (33.99, "2 servers are"),
        (6.8, "5 servers are"),
    ],
)
def test_the_lead_begins_with_what_a_server_carried_and_can_serve(deployment, capacity, needs):
    facts = {"load": LOAD, "capacity": ServerCapacity(capacity, 6.0, 36.0, 5.5)}
    said = lead(_with(deployment).model_copy(update=facts))
    assert said.startswith("One server carried 6.8 requests/s over 30 s and can serve ")
    assert " (6 to 36); from 5.5 on, the knee, latency grows faster than throughput. " in said
    assert f"For the 27.2/s recorded, {needs} enough" in said
    assert START in said


def test_several_deployments_are_named_by_their_range(deployment):
    other = _with(deployment, holdout={"mdape_pct": 13.4})
    assert least_exact([("a", _with(deployment)), ("b", other)]) == (
        "Step times are typically within 2.8 to 13.4 %, by deployment; `b` is the least exact."
    )
    assert least_exact([("a", _with(deployment)), ("b", _with(deployment))]).endswith(
        "within 2.8 % in every deployment."
    )


def _criterion(measure, value, answer, *, higher=False, reason="as it is"):
    return Criterion(
        measure=measure,
        value=value,
        yes=5.0 if not higher else 0.95,
        with_limits=15.0 if not higher else 0.8,
        higher_is_better=higher,
        answer=answer,
        reason=reason,
    )


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (
            _criterion("step_mape_pct", 14.23, "with limits"),
            "Step times are off by 14.2 % on average (at most 5 % needed).",
        ),
        (
            _criterion("step_mape_pct", 26.0, "no"),
            "Step times are off by 26.0 % on average (at most 15 % needed).",
        ),
        (_criterion("step_bias_pct", 0.038, "yes"), "Summed over time, steps are off by 0.04 %."),
        (
            _criterion("queue_regime_accuracy", 0.7, "no", higher=True),
            "Which requests have to wait is predicted right 70 % of the time (at least 80 % needed).",
        ),
        (
            _criterion("step_extrapolated_pct", 25.6, "with limits"),
            "25.6 % of the held-out steps carried a load that was never trained on (at most 5 % needed).",
        ),
        (_criterion("queue_wait_skill", None, "with limits", reason="not known"), "Not known."),
        (_criterion("another", 1.0, "no", reason="worded elsewhere"), "Worded elsewhere."),
        (
            _criterion("admission_skill", -0.2, "no", higher=True).model_copy(update={"with_limits": 0.0}),
            "The model of admission is no better than a constant guess, the training median.",
        ),
    ],
)
def test_a_verdict_is_a_sentence(deployment, criterion, words):
    verdict = Verdict(answer=criterion.answer, reasons=(), criteria=(criterion,))
    (one,) = verdicts(deployment.model_copy(update={"verdicts": {"simulation": verdict}})).uses
    assert (one.use, one.answer, one.sentence) == ("simulation", criterion.answer, words)


def test_a_model_that_is_lost_says_why(deployment):
    criterion = _criterion("admission_mdape_pct", None, "no", reason="alpha.admission is not fitted")
    verdict = Verdict(answer="no", reasons=(), criteria=(criterion,))
    lost = (Missing(name="alpha.admission", reason="no journeys"),)
    changed = deployment.model_copy(update={"verdicts": {"alerting": verdict}, "not_fitted": lost})
    assert verdicts(changed).uses[0].sentence == "There is no model `alpha.admission`: no journeys."


@pytest.mark.parametrize(
    ("pct", "words"),
    [
        (24.8, "a quarter"),
        (48, "half"),
        (33.0, "a third"),
        (100, "all"),
        (98.0, "98.0 %"),
        (14.0, "14.0 %"),
        (0.4, "0.40 %"),
    ],
)
def test_fractions_are_words_where_one_is_near(pct, words):
    assert fraction(pct) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.03794, "0.04"),
        (0.001, "<0.01"),
        (0, "0"),
        (2.84, "2.8"),
        (13.44, "13.4"),
        (5340.2, "5,340"),
        (-1.45, "-1.4"),
        (None, "-"),
    ],
)
def test_percentages_have_the_digits_that_mean_something(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    ("phrase", "sentence_of_it"),
    [
        ("the law is the package's own", "The law is the package's own."),
        ("alpha.queue_wait is not fitted", "alpha.queue_wait is not fitted."),
        ("num_gpu_blocks 220,584 (worked out)", "num_gpu_blocks 220,584 (worked out)."),
        ("qwen3-32b-tp4: 131 numbers have no record", "qwen3-32b-tp4: 131 numbers have no record."),
        ("left-out blocks show it", "Left-out blocks show it."),
        ("prompts. They are long", "Prompts. They are long."),
    ],
)
def test_a_name_of_code_keeps_its_letters_at_the_beginning_of_a_sentence(phrase, sentence_of_it):
    assert sentence(phrase) == sentence_of_it


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        ("replay_pct", "its speed varies by 5 %"),
        ("step_bias_pct", "its speed changed by 5 %"),
        ("step_p90_ape_pct", "by itself it puts steps 5 % off"),
    ],
)
def test_the_noise_of_a_machine_says_what_it_does(measure, words):
    assert machine_words(measure, 5.0) == f"this machine is too noisy for that ({words}), and no recording will help"
