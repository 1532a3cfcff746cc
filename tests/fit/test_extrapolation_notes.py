"""Steps beyond the range of the training rows, by hand."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.fit.holdout import beyond_training
from tracefit.models.schema import Term


def _term(name, low, high):
    return Term(feature=name, unit="us/token", value=-33.0, training_range=(low, high))


def test_a_feature_far_beyond_its_training_range_is_named():
    """Of four known steps one has 577 tokens where no training row has more than 27; 27 and 54 are not twice as
    much."""
    steps = pl.DataFrame({"prefill_tokens": [0, 3, None, 27, 577], "num_decode_reqs": [54, 1, 2, 3, 4]})
    terms = (_term("prefill_tokens", 0, 27), _term("num_decode_reqs", 1, 27), _term("share", 0, 0.1))
    (note,) = beyond_training(terms, steps)
    assert "prefill_tokens is up to 27 in the training rows and up to 577 in the runs' steps (25 %" in note


@pytest.mark.parametrize("tokens", [[27, 0], []])
def test_steps_within_the_range_need_no_note(tokens):
    assert beyond_training((_term("prefill_tokens", 0, 27),), pl.DataFrame({"prefill_tokens": tokens})) == ()
