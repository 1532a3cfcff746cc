"""Plan servers for a load: those of some folders, and those that a transfer computes."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tracefit.commands.locate import as_list
from tracefit.commands.plan import asked_for, draw_plans, plans_of, ranked
from tracefit.errors import TracefitError, UsageError
from tracefit.options import (
    DayOptions,
    DeploymentOption,
    FigureOption,
    LoadOptions,
    PlannedArgument,
    PriceOption,
    RateOption,
    RunOption,
    ServerCountOption,
    ServerOptions,
    TriedForceOption,
    TriedModelOption,
    TryOption,
    named,
)
from tracefit.progress import NullProgress
from tracefit.results.plans import PlanResult
from tracefit.server.hardware import find_gpu
from tracefit.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tracefit.progress import Progress

MOST_TRIED = 64
"""Combinations that are tried: each is a transfer and a plan, some seconds."""
_TRY_NAMES = {"gpu": "gpu", "tp": "tp", "tensor_parallel": "tp"}


def plan(
    folders: PlannedArgument = None,
    *,
    rate: RateOption = None,
    servers: ServerCountOption = None,
    slo_ms: Mapping[str, float] | None = None,
    settings: Mapping[str, object] | None = None,
    requests: LoadOptions | None = None,
    day: DayOptions | None = None,
    price: PriceOption = None,
    tries: TryOption = None,
    model_config: TriedModelOption = None,
    force: TriedForceOption = False,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    figure: FigureOption = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Return the fewest servers for a rate, or the largest rate of a number of servers, for every kind of server.

    Each answer comes from a replay of a steady load with the models of a folder. Its interval comes from the intervals
    of the coefficients and from the errors of replays of recorded runs. It says if it rests on steps unlike those in
    training.

    Args:
        folders: Folders that `tracefit run` wrote, or folders of coefficient files; each deployment in them is a kind
            of server.
        rate: Requests per second over all servers.
        servers: Number of servers. If a rate is given too, exactly this pair is tried.
        slo_ms: The longest time, in ms, allowed for percentiles, such as `{"ttft_p99": 500}`.
        settings: Settings to change, such as `{"max_num_seqs": 256}`.
        requests: The requests; the traced ones if not given. With a file of arrivals, the fewest servers for it, window
            by window.
        day: How a file of arrivals is planned for.
        price: Price of a GPU per hour, in any currency: of every GPU, or by its name.
        tries: Servers to compute by a transfer and to plan with too, such as `{"gpu": ["H100", "H200"], "tp": ["1",
            "2"]}`: every combination, from the folders, or without any from the law in the package.
        model_config: config.json of the model, for `tries`.
        force: With `tries`, also answer where nothing shows how exact the answer is.
        deployment: Plan only this deployment; see `Models.deployment`.
        run: Plan only the deployment of this run.
        figure: An `.html` page to write, with percentiles over the rate and a rate and an objective that can be moved.
        progress: Receives the name of each deployment.

    Raises:
        UsageError: A folder, an option or an objective is wrong, or a setting changes what the models cannot predict.
        TracefitError: There is nothing to draw, or the libraries that draw it are missing.

    Examples:
        >>> import tracefit
        >>> (plan,) = tracefit.plan("out/", rate=40, slo_ms={"ttft_p99": 500}).plans
        >>> plan.servers, plan.met
        (2, True)
    """
    locations, progress = as_list(folders or ()), progress or NullProgress()
    if not locations and not tries:
        raise UsageError(
            "no folder is given",
            hint=f"name folders that `tracefit run` wrote, or servers to compute: {named(TryOption)} gpu=H100,H200",
        )
    asked = asked_for(
        rate=rate,
        servers=servers,
        slo_ms=slo_ms,
        settings=settings,
        requests=requests,
        day=day,
        price=price,
        figure=figure,
    )
    plans = plans_of(locations, asked, deployment=deployment, run=run, progress=progress)
    left_out: tuple[str, ...] = ()
    if tries:
        with tried_servers(locations, tries, model_config, force=force, progress=progress) as tried:
            left_out = tried.left_out
            for name, folder in tried.folders:
                (one,) = plans_of([folder], asked, progress=progress)
                plans.append(replace(one, folder=name))
    if figure is not None:
        draw_plans(plans, Path(figure))
    return PlanResult(tuple(plans), ranked(plans, asked), left_out)


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
        if not equals or not listed or name.strip() not in _TRY_NAMES:
            raise UsageError(
                f"{named(TryOption)} {text}: not of the form NAME=VALUE,VALUE",
                hint="NAME is gpu or tp; for example gpu=H100,H200 and tp=1,2,4",
            )
        key = _TRY_NAMES[name.strip()]
        tries[key] = tuple(dict.fromkeys((*tries.get(key, ()), *listed)))
    return tries


@contextmanager
def tried_servers(
    folders: Sequence[str | Path],
    tries: Mapping[str, Iterable[str]],
    model_config: str | Path | None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Iterator[Tried]:
    """Compute every combination of some GPUs and tensor parallelisms by a transfer; their folders last as long as the
    context.

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
            hint=(
                f"name the GPUs and the model, as in {named(TryOption)} gpu=H100,H200 {named(TriedModelOption)} "
                "config.json"
            ),
        )
    gpus = [find_gpu(name).name for name in tries["gpu"]]
    sizes = [_size(text) for text in tries.get("tp", ("1",))]
    combinations = list(itertools.product(dict.fromkeys(gpus), dict.fromkeys(sizes)))
    if len(combinations) > MOST_TRIED:
        raise UsageError(
            f"{named(TryOption)}: {plural(len(combinations), 'combination')} are too many",
            hint=f"at most {MOST_TRIED}",
        )
    from tracefit.commands.transfer import transfer  # noqa: PLC0415 - scikit-learn takes longer than most plans

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
