"""Consumers are listed by name, and no name stands for two."""

from __future__ import annotations

import pytest

from tracefit.consumers import CONSUMERS, known
from tracefit.consumers.base import Consumer
from tracefit.consumers.csv import to_csv


def test_consumers_are_in_the_order_of_their_names():
    assert list(known()) == sorted(one.name for one in CONSUMERS)


def test_a_second_consumer_of_a_name_is_refused():
    with pytest.raises(ValueError, match=r"two consumers have one name: .*csv.*csv"):
        known((*CONSUMERS, Consumer("csv", to_csv)))
