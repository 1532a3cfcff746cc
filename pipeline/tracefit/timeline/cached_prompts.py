"""Whether prompts were in the prefix cache of an unmodified server, whose spans do not say so: by the times of the
steps that compute them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from tracefit.statistics import SD_OF_MEDIAN, robust_sd
from tracefit.timeline import thresholds
from tracefit.timeline.request_graph import robust_fit

if TYPE_CHECKING:
    from tracefit.statistics import Flags, Vector


class SinglePrompts(NamedTuple):
    """Intervals that compute one prompt, in the order of its length; arrays have the shape (n,).

    Attributes:
        length: Tokens of the prompt.
        prompt_us: How much longer the interval took than its batch without the prompt.
        variance: Square of the standard deviation of that time, by the noise of steps without a prompt.
        odd_without: Share of the intervals without a prompt whose time is odd.
    """

    length: Vector
    prompt_us: Vector
    variance: Vector
    odd_without: float


def longest_whole_prompt(rows: pl.DataFrame) -> float | None:
    """Return the length up to which prompts are computed as a whole; null where nothing shows prefix-cache hits.

    A hit saves whole blocks, so that the times of prompts of about equal length differ by more than those of steps
    without a prompt (*O*), and longer prompts take less time than shorter ones (*D*). Without hits, times grow smoothly
    with the length, and scatter no more than those of other steps.

    Args:
        rows: One row per interval: interval_steps; y (us), prompts, prompt_tokens, decodes and contexts, means per
            step.

    Returns:
        Tokens, a power of two; 0 where prompts of every length scatter.
    """
    prompts = _single_prompts(rows)
    if prompts is None:
        return None
    length, prompt_us = prompts.length, prompts.prompt_us
    odd, usual = odd_prompts(prompts), thresholds.USUAL_ODD + prompts.odd_without
    is_odd = odd.mean() > usual + thresholds.SURE_SHARE_SD * np.sqrt(usual / odd.size)
    if not is_odd and largest_drop_sd(prompt_us) <= thresholds.SURE_FALL_SD:
        return None
    for most in 2.0 ** np.arange(int(np.log2(length[-1])), 3, -1):
        short = odd[length[1:-1] <= most]
        is_smooth = short.size >= thresholds.LEAST_SAMPLES and short.sum() <= 1 + usual * short.size
        if is_smooth and largest_drop_sd(prompt_us[length <= most]) <= thresholds.SURE_FALL_SD:
            return float(most)
    return 0.0


def _single_prompts(rows: pl.DataFrame) -> SinglePrompts | None:
    """Return the intervals with one prompt and the time that it takes; null where they, or those without a prompt, are
    few.
    """
    steps = rows["interval_steps"].cast(pl.Float64).to_numpy()
    prompts, tokens, *batch = (
        rows[name].to_numpy() * steps for name in ("prompts", "prompt_tokens", "decodes", "contexts")
    )
    # Servers with CUDA graphs pad a batch to the next captured size.
    padded = 2 ** np.ceil(np.log2(np.maximum(rows["decodes"].to_numpy(), 1.0))) * steps
    x, time_us = np.c_[steps, *batch, padded], rows["y"].to_numpy() * steps
    number = prompts.round()
    without = number == 0
    one = np.flatnonzero(number == 1)
    if min(one.size, without.sum()) < thresholds.LEAST_SAMPLES:
        return None
    one = one[np.argsort(tokens[one], kind="stable")]
    decode_us = x @ robust_fit(x[without], time_us[without])
    excess_us, step_us = time_us - decode_us, decode_us / steps
    noise = (excess_us / decode_us)[without]
    of_step, of_interval = _noise_shares(noise, steps[without])
    usual_noise = np.sqrt(of_step / steps[without] + of_interval)
    # The steps of an interval add up; the one with the prompt takes longer and scatters by as large a share.
    with_prompt_us = np.maximum(excess_us + step_us, step_us)
    variance = of_step * (step_us**2 * (steps - 1) + with_prompt_us**2)[one]
    variance += of_interval * (step_us * (steps - 1) + with_prompt_us)[one] ** 2
    # Disturbances of steps without a prompt also disturb steps with one.
    is_odd = np.abs(noise - np.median(noise)) > thresholds.ODD_SD * usual_noise
    return SinglePrompts(tokens[one], excess_us[one], variance, float(is_odd.mean()))


def odd_prompts(prompts: SinglePrompts) -> Flags:
    """Return which prompts, but the shortest and the longest, take another time than the next shorter and the next
    longer; *O* is the mean.
    """
    length, prompt_us, variance = prompts.length, prompts.prompt_us, prompts.variance
    weight = np.diff(length)[:-1] / np.maximum(length[2:] - length[:-2], 1)
    off_us = prompt_us[1:-1] - (1 - weight) * prompt_us[:-2] - weight * prompt_us[2:]
    sd_us = np.sqrt(variance[1:-1] + (1 - weight) ** 2 * variance[:-2] + weight**2 * variance[2:])
    return np.asarray(np.abs(off_us) > thresholds.ODD_SD * sd_us)


def _noise_shares(noise: Vector, steps: Vector) -> tuple[float, float]:
    """Return the variance of a step by itself, and the one that the steps of an interval have in common; both of shares
    of the time.

    A machine that is slow for a second is so for every step of an interval: in long ones, that does not average out.
    """
    is_long = steps > thresholds.LONG_STEPS
    common = robust_sd(noise[is_long]) ** 2 if is_long.sum() >= thresholds.LEAST_SAMPLES else 0.0
    is_short = steps <= thresholds.FEW_STEPS
    if is_short.sum() < thresholds.LEAST_SAMPLES:
        is_short = np.ones(len(steps), dtype=bool)
    # Short intervals have the common part, too.
    both = robust_sd(noise[is_short] * np.sqrt(steps[is_short])) ** 2
    return max(both - common * float(np.median(steps[is_short])), thresholds.LEAST_NOISE**2), common


def largest_drop_sd(prompt_us: Vector) -> float:
    """Return *D*: by how many standard errors the median time of some prompts is below that of shorter ones; times in
    the order of the lengths.
    """
    groups = np.array_split(
        prompt_us, max(min(prompt_us.size // thresholds.LEAST_SAMPLES, thresholds.LENGTH_GROUPS), 1)
    )
    middle = np.array([np.median(group) for group in groups])
    # The standard error of a median of normal values is sqrt(pi / 2) times that of their mean.
    error = np.array([SD_OF_MEDIAN * robust_sd(group) / np.sqrt(group.size) for group in groups])
    longest = np.maximum.accumulate(middle)
    error_of_longest = error[np.maximum.accumulate(np.where(middle == longest, np.arange(middle.size), 0))]
    drop_us, error_us = longest - middle, np.hypot(error, error_of_longest)
    return float(np.divide(drop_us, error_us, out=np.where(drop_us > 0, np.inf, 0.0), where=error_us > 0).max())
