"""Replay requests as BLIS does for one instance: its step time, its alpha, its scheduler's rules, in whole us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tracefit.replay.engine import BLIS_RULES
from tracefit.replay.run import RequestLoad, replay

if TYPE_CHECKING:
    from tracefit.consumers.blis_roofline import RooflineShape
    from tracefit.replay.engine import EngineSettings, StepBatch, StepTimeModel
    from tracefit.statistics import Integers, Matrix, Vector


class _WholeSteps(ABC):
    """Step times of BLIS in us, cut to whole us and at least 1."""

    __slots__ = ()

    @abstractmethod
    def exact(self, batch: StepBatch, context: float | Vector) -> float | Vector:
        """Return the time of one step before it is cut, or of several that differ only in their context tokens."""

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step; 1 us where it computes nothing."""
        computes = batch.decode_reqs or (batch.prefill_reqs and batch.prefill_tokens)
        return max(int(self.exact(batch, batch.context_tokens)), 1) if computes else 1

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps in which the same requests decode."""
        took = self.exact(batch, batch.context_tokens + growth * np.arange(steps, dtype=np.float64))
        return np.asarray(np.maximum(np.floor(took), 1.0))


@dataclass(frozen=True, slots=True)
class StepRates(_WholeSteps):
    """Step time of BLIS as a sum of six products.

    Attributes:
        constant: Per step.
        request: Per request in the step.
        prefill_token: Per prompt token computed.
        prefill_pair: Per t * (s + t / 2) of a prefill request that computes t tokens of a prompt of s.
        decode_request: Per request that decodes.
        context_token: Per token in the caches of the requests that decode.
        larger: Pairs of further sums whose larger one is added: the terms of a phase in the form of eight coefficients.
    """

    constant: float
    request: float
    prefill_token: float
    prefill_pair: float
    decode_request: float
    context_token: float
    larger: tuple[tuple[StepRates, StepRates], ...] = ()

    def exact(self, batch: StepBatch, context: float | Vector) -> float | Vector:
        """Return the sum."""
        took = (
            self.constant
            + self.request * (batch.decode_reqs + (batch.prefill_reqs if batch.prefill_tokens else 0))
            + self.prefill_token * batch.prefill_tokens
            + self.prefill_pair * batch.prefill_pairs
            + self.decode_request * batch.decode_reqs
            + self.context_token * context
        )
        for one, other in self.larger:
            took = took + np.maximum(one.exact(batch, context), other.exact(batch, context))
        return took


@dataclass(frozen=True, slots=True)
class RooflineRates(_WholeSteps):
    """Step time of BLIS's backend `roofline`: the larger of compute and memory time.

    Attributes:
        shape: Operations and bytes of a step.
        factors: Multiples of the peak times: prefill compute, decode compute, memory.
    """

    shape: RooflineShape
    factors: Vector

    def exact(self, batch: StepBatch, context: float | Vector) -> float | Vector:
        """Return the larger time."""
        prefill = (batch.prefill_tokens, batch.prefill_context_tokens, batch.prefill_attention_pairs)
        took = roofline_us(self.shape.terms((*prefill, batch.decode_reqs, context)), self.factors)
        return took if isinstance(context, np.ndarray) else took.item()


def roofline_us(terms: Matrix, factors: Vector) -> Vector:
    """Return the step times of terms, before they are cut, shape (n,)."""
    return np.asarray(np.maximum(terms[:, :2] @ factors[:2], terms[:, 2] * factors[2]))


class ReplayedRequests(msgspec.Struct, frozen=True):
    """Latencies in us, one per request in the order of the arguments, NaN for one that never finished.

    Attributes:
        ttft: Arrival to first token.
        decode: First token to last token.
        e2e: Arrival to departure.
        preemptions: Preemptions over all requests.
    """

    ttft: Vector
    decode: Vector
    e2e: Vector
    preemptions: int


def replay_as_blis(
    arrivals: Integers,
    prompts: Integers,
    outputs: Integers,
    rates: StepTimeModel,
    alpha: tuple[float, float, float],
    limits: EngineSettings,
    shared: Integers | None = None,
) -> ReplayedRequests:
    """Replay the requests of one engine.

    Args:
        arrivals: Times in us, ascending, shape (n,).
        prompts: Prompt tokens, shape (n,).
        outputs: Output tokens, at least 1, shape (n,).
        rates: The step time.
        alpha: ARRIVED to QUEUED, FINISHED to DEPARTED, and FINISHED to DEPARTED per output token, in whole us.
        limits: Limits of the scheduler.
        shared: Length of each prompt's shared prefix, the same for all prompts with that length; none by default.
    """
    load = RequestLoad(arrivals, prompts, outputs, shared)
    replayed = replay(load, rates, limits, admission_us=alpha[0], rules=BLIS_RULES)
    # BLIS adds the per-token overhead to each token, and the fixed one once, at the end.
    ttft = replayed.first_us - arrivals + alpha[2]
    decode = replayed.last_us - replayed.first_us + alpha[2] * (outputs - 1).astype(float)
    return ReplayedRequests(ttft, decode, ttft + decode + alpha[1], replayed.preemptions)
