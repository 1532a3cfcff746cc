"""Servers to choose from: transfers to every combination of some GPUs and tensor parallelisms, and prices of GPUs."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tracefit.commands.transfer import transfer
from tracefit.errors import TracefitError, UsageError
from tracefit.options import PriceOption, ServerOptions, TriedModelOption, TryOption, named
from tracefit.progress import NullProgress
from tracefit.server.hardware import find_gpu
from tracefit.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.progress import Progress

MOST_TRIED = 64
"""Combinations that are tried: each is a transfer and a plan, some seconds."""
_NAMES = {"gpu": "gpu", "tp": "tp", "tensor_parallel": "tp"}

Prices = float | Mapping[str, float] | None
"""A price per GPU and hour: of every GPU, or by its name."""


class Tried(NamedTuple):
    """Servers that were computed.

    Attributes:
        folders: Name of each, such as `H200 tp4`, and the folder of its models.
        left_out: Why others are not there, a sentence each.
    """

    folders: tuple[tuple[str, Path], ...]
    left_out: tuple[str, ...]


def parse_tries(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Read `gpu=H100,H200` and `tp=1,2` from the command line.

    Raises:
        UsageError: A text of another form.
    """
    tries: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        listed = tuple(dict.fromkeys(v.strip() for v in values.split(",") if v.strip()))
        if not equals or not listed or name.strip() not in _NAMES:
            raise UsageError(
                f"{named(TryOption)} {text}: not of the form NAME=VALUE,VALUE",
                hint="NAME is gpu or tp; for example gpu=H100,H200 and tp=1,2,4",
            )
        key = _NAMES[name.strip()]
        tries[key] = tuple(dict.fromkeys((*tries.get(key, ()), *listed)))
    return tries


def parse_prices(texts: Sequence[str]) -> Prices:
    """Read prices from the command line: a number for every GPU, or `H200=3.5` for one.

    Raises:
        UsageError: A text of another form, or a number beside names.
    """
    if not texts:
        return None
    pairs = [text.rpartition("=") for text in texts]
    try:
        values = {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        values = {}
    if len(values) != len(texts) or ("" in values and len(values) > 1):
        raise UsageError(
            f"{named(PriceOption)} {' '.join(texts)}: not one price, and not prices by GPU",
            hint="a number such as 2.5, or a number for each GPU, such as H100=2.5 and H200=3.5",
        )
    return values.get("", values)


def price_of(prices: Prices, gpu: str | None) -> float | None:
    """Return the price of a GPU; null where none is stated."""
    return prices.get(gpu or "") if isinstance(prices, Mapping) else prices


def checked_prices(prices: Prices) -> Prices:
    """Return prices by the names of the catalogue.

    Raises:
        UsageError: A price is below 0 or not finite, or a GPU is not known.
    """
    if prices is None:
        return None
    for value in prices.values() if isinstance(prices, Mapping) else (prices,):
        if not 0 <= value < math.inf:
            raise UsageError(f"{named(PriceOption)} {value:g}: is out of range", hint="at least 0")
    return (
        {find_gpu(name).name: value for name, value in prices.items()}
        if isinstance(prices, Mapping)
        else prices
    )


@contextmanager
def tried_servers(
    folders: Sequence[str | Path],
    tries: Mapping[str, Iterable[str]],
    model_config: str | Path | None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Iterator[Tried]:
    """Compute every combination of some GPUs and tensor parallelisms by a transfer; their folders last as long as the context.

    Args:
        folders: Sources of the law; the law in the package without any.
        tries: Values of `gpu` and `tp`.
        model_config: config.json of the model.
        force: Answer where nothing shows how exact the answer is.
        progress: Receives the name of each.

    Raises:
        UsageError: The model or the GPUs are not given, a value is not valid, or there are too many combinations.
    """
    progress = progress or NullProgress()
    if model_config is None or "gpu" not in tries:
        missing = "gpu=..." if "gpu" not in tries else named(TriedModelOption)
        raise UsageError(
            f"{named(TryOption)}: {missing} is not given",
            hint=f"name the GPUs and the model, as in {named(TryOption)} gpu=H100,H200 {named(TriedModelOption)} config.json",
        )
    gpus = [find_gpu(name).name for name in tries["gpu"]]
    sizes = [_size(text) for text in tries.get("tp", ("1",))]
    combinations = list(itertools.product(dict.fromkeys(gpus), dict.fromkeys(sizes)))
    if len(combinations) > MOST_TRIED:
        raise UsageError(
            f"{named(TryOption)}: {plural(len(combinations), 'combination')} are too many",
            hint=f"at most {MOST_TRIED}",
        )
    found, left_out = [], []
    with tempfile.TemporaryDirectory(prefix="tracefit-") as into:
        for gpu, tp in combinations:
            name = f"{gpu} tp{tp}"
            progress.stage(f"computing {name}")
            folder = Path(into) / f"{gpu.lower()}-tp{tp}"
            try:
                server = ServerOptions(model_config=Path(model_config), gpu=gpu, tp=tp)
                transfer(folders, folder, server=server, force=force)
            except TracefitError as error:
                left_out.append(f"{name}: {error.line()}")
            else:
                found.append((name, folder))
        yield Tried(tuple(found), tuple(left_out))


def _size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise UsageError(f"{named(TryOption)} tp={text}: no number of GPUs", hint="a whole number from 1 on")
    return int(text)
