"""Plan servers: how many a load needs to keep to its objectives, or the largest load of a number of them."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import polars as pl

from tracefit.coefficients.files import find_models
from tracefit.coefficients.models import load
from tracefit.commands.day import DayQuestion, day_server, refuse_options, with_day
from tracefit.commands.locate import choose_deployment, published_replays, tables_of
from tracefit.commands.predict import read_rows
from tracefit.commands.prices import Prices, checked_prices, price_of
from tracefit.commands.recorded import carried, complete_requests, is_whole
from tracefit.commands.timed_requests import read_timed_requests
from tracefit.errors import DataError, TracefitError, UsageError, did_you_mean
from tracefit.models.targets import LATENCY_TITLES
from tracefit.options import (
    CalibrateOption,
    ChangesOption,
    DayOptions,
    FigureOption,
    LoadOptions,
    ObjectivesOption,
    RateOption,
    ServerCountOption,
    flag_of,
    named,
)
from tracefit.replay.acceptance import measured_acceptance
from tracefit.replay.arrivals import GAP_BLOCK, burstiness, relative_gaps
from tracefit.replay.closed_loop import engine_settings
from tracefit.replay.plan import (
    ANSWER_REQUESTS,
    SATURATED,
    Curve,
    Fleet,
    TrafficSample,
    anchored,
    curve_of,
    fewest_servers,
    largest_rate,
    plan_point,
    plan_points,
    with_anchors,
)
from tracefit.reports.document import Report
from tracefit.reports.figures.day import day_figure
from tracefit.reports.figures.evaluation import plan_figure
from tracefit.reports.sentences import speed_text
from tracefit.results.plans import (
    Objective,
    PlannedArrivals,
    PlannedDrafts,
    PlannedLoad,
    RankedServers,
    ServerCapacity,
    ServerPlan,
)
from tracefit.server.settings import canonical_name, settings_from
from tracefit.tables.disk import write_files
from tracefit.tables.schema import ENGINE, TABLES
from tracefit.tables.store import TableStore
from tracefit.text import number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tracefit.coefficients.models import Models
    from tracefit.models.deployment import DeploymentModels
    from tracefit.progress import Progress
    from tracefit.replay.acceptance import Acceptance
    from tracefit.replay.engine import EngineSettings
    from tracefit.results.plans import PlanPoint
    from tracefit.results.replays import RunReplay
    from tracefit.statistics import Integers, Vector


_NOT_REPLAYED = "no run was replayed in a closed loop: intervals come only from the step time"
_SLO_POINTS = tuple(f"{latency}_p{q}_ms" for latency in LATENCY_TITLES for q in (50, 90, 99))
_SLO_NAME = re.compile(r"(ttft|itl|e2e)_p(\d{1,2}(?:\.\d{1,3})?)")
_ArrivalsOption = Literal["poisson", "traced"]
_DAY = ("window_s", "scale_up_s", "scale_step")
_GROWS = (
    "at {rate} requests per second the queues grow if steps take as long as planned: latencies are open, and only if "
    "they take less are they as at the low ends"
)
_NEAR_CAPACITY = (
    "{rate} requests per second are more than {share} % of the capacity: how long the queue gets depends on some "
    "percent of the capacity, which the models do not know so well, and latencies other than ITL have no high end"
)
_NOT_SURE = "no number of servers is sure to be enough: at the high end of the interval the objectives hold nowhere"
_NOT_BELOW = (
    "the objectives hold at {rate} requests per second and not at some lower rates: the largest rate is the one up to "
    "which they hold at every lower one"
)
_ROUTED = {
    "random": "requests go to servers at random, as behind a plain load balancer",
    "round_robin": "requests go to servers in turn",
}
MOST_DEPLOYMENTS = 4
"""Deployments for whose rates a training waits: each takes some seconds."""
_SHARES_OF_A_REPORT = (0.15, 0.55, 0.8, 1.0)
"""Rates of a report, as shares of the capacity: some of those of a plan, whose replays they are. Others between them
would cost a training more time than they make the latencies exact."""
_OWN = (
    "step times are those of {now}: `tracefit transfer` computes those of another server, or record one; then "
    "plan with its folder beside this one"
)
_REFUSED_SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("model", "gpu", "tensor_parallel", "pipeline_parallel", "enable_expert_parallel", "dtype"),
            *("quantization", "kv_cache_dtype", "enforce_eager", "async_scheduling"),
        ),
        _OWN,
    ),
    "data_parallel": "a plan counts engines: give their number with {servers}",
    "gpu_memory_utilization": "it decides the number of KV blocks: give num_gpu_blocks, as the server logs it",
    "scheduling_policy": "no trace says which priority a request has",
    **dict.fromkeys(
        (f"{name}_sample_rate" for name in ("journey_tracing", "step_tracing", "step_tracing_rich")),
        "it changes what is traced, not what the server does",
    ),
    "step_tracing_rich_subsample_rate": "it changes what is traced, not what the server does",
}
PLANNED_SETTINGS = (
    *("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "block_size", "max_model_len"),
    *("enable_chunked_prefill", "enable_prefix_caching"),
)


def asked_for(
    *,
    rate: float | None,
    servers: int | None,
    slo_ms: Mapping[str, float] | None,
    settings: Mapping[str, object] | None,
    requests: LoadOptions | None,
    day: DayOptions | None,
    price: Prices,
    figure: str | Path | None,
) -> PlanQuestion:
    """Return a question, checked, with the requests of a file of arrivals.

    Raises:
        UsageError: An option or an objective is wrong, or the file.
        DataError: The file has no request that is usable.
    """
    asked = PlanQuestion(
        rate,
        servers,
        _objectives(slo_ms or {}),
        dict(settings or {}),
        requests or LoadOptions(),
        checked_prices(price),
    )
    _check(asked)
    if asked.requests.arrivals in get_args(_ArrivalsOption):
        if day is not None and day != DayOptions():
            name = next(n for n in _DAY if getattr(day, n) != getattr(DayOptions(), n))
            raise UsageError(
                f"{named(DayOptions, name)} is of a file of arrivals",
                hint=f"give one with {named(LoadOptions, 'arrivals')}",
            )
    else:
        file, lengths = (
            Path(asked.requests.arrivals),
            {n: getattr(asked.requests, n) for n in ("prompt", "output")},
        )
        timed = read_timed_requests(file, lengths)
        asked = msgspec.structs.replace(
            asked, day=DayQuestion(timed, file.name, day or DayOptions(), asked.requests.router)
        )
    if figure is not None and Path(figure).suffix != ".html":
        raise UsageError(
            f"{named(FigureOption)} {figure}: a figure is a page", hint="give it a name that ends in .html"
        )
    return asked


def plans_of(
    locations: Sequence[str | Path],
    asked: PlanQuestion,
    *,
    deployment: str | None = None,
    run: str | None = None,
    progress: Progress,
) -> list[ServerPlan]:
    """Return the answer for every deployment of some folders, or only for that of a name or a run.

    Raises:
        UsageError: A folder is wrong, or a setting changes what the models cannot predict.
    """
    plans: list[ServerPlan] = []
    for folder in locations:
        models = load(find_models(folder))
        chosen = choose_deployment(models, deployment, run)
        for deployment_id in [models.deployment(chosen).deployment_id] if chosen else models.deployment_ids:
            progress.stage(f"planning {deployment_id}")
            plans.append(_planned(folder, models.deployment(deployment_id or None), asked))
    return plans


def ranked(plans: Sequence[ServerPlan], asked: PlanQuestion) -> tuple[RankedServers, ...]:
    """Return the kinds of server that carry a rate, the cheapest first: by price, or by GPUs where some price is not
    stated. Kinds without a sure number come last.
    """
    if (asked.rate is None and asked.day is None) or asked.servers is not None or len(plans) < 2:
        return ()
    found = [_costed(one, asked.price) for one in plans if one.reason is None and one.servers]
    is_priced = all(one.cost_per_hour is not None for one in found)

    def cost(one: RankedServers, *, low: bool = False) -> float:
        if is_priced:
            return (one.cost_per_hour_low if low else one.cost_per_hour) or 0.0
        return one.gpus_low if low else one.gpus

    order = sorted(found, key=lambda one: (not one.is_sure, cost(one), one.name))
    least = cost(order[0]) if order else 0.0
    return tuple(replace(one, ties=cost(one, low=True) <= least) for one in order)


def _costed(plan_: ServerPlan, prices: Prices) -> RankedServers:
    price, servers = price_of(prices, plan_.gpu), plan_.servers or 1
    least = min(servers, plan_.servers_low or servers)
    gpus, gpus_low = servers * plan_.gpus_per_server, least * plan_.gpus_per_server
    return RankedServers(
        name=plan_.folder,
        deployment_id=plan_.deployment_id,
        gpu=plan_.gpu,
        servers=servers,
        servers_low=least,
        is_sure=plan_.is_sure,
        gpus=gpus,
        gpus_low=gpus_low,
        cost_per_hour=None if price is None else price * gpus,
        cost_per_hour_low=None if price is None else price * gpus_low,
        binds=_binds(plan_),
        origin=plan_.origin,
        is_tested=plan_.is_tested,
        ties=False,
    )


def _binds(plan_: ServerPlan) -> str | None:
    """Return the objective that is nearest to its limit, at the rate or in the window that needs the most servers."""
    values = {one.name: one.value for one in plan_.day.latencies} if plan_.day else {}
    if plan_.at is not None:
        values = {one.name: one.value for one in plan_.at.latencies}
    return (
        max(
            (o for o in plan_.objectives),
            key=lambda o: (values[o.name] or math.inf) / o.limit_ms if values else 0.0,
        ).name
        if plan_.objectives
        else None
    )


def draw_plans(plans: Iterable[ServerPlan], path: Path) -> None:
    """Write a page with a figure of each plan."""
    from tracefit.reports.page import html_page  # noqa: PLC0415 - an extra installs its libraries

    plans = list(plans)
    figures = tuple(filter(None, (day_figure(one) or plan_figure(one) for one in plans)))
    if not figures:
        raise DataError("there is nothing to draw: no deployment could be planned")
    title = "Servers over the day" if any(one.day for one in plans) else "Servers and their latencies over the rate"
    write_files({path: html_page(Report(title, "", figures))})


class PlanQuestion(msgspec.Struct, frozen=True):
    """A question to a plan; see `candidates.plan`."""

    rate: float | None
    servers: int | None
    objectives: tuple[Objective, ...]
    settings: dict[str, object]
    requests: LoadOptions
    price: Prices
    day: DayQuestion | None = None


def _objectives(slo_ms: Mapping[str, float]) -> tuple[Objective, ...]:
    objectives = []
    for name, limit in slo_ms.items():
        match = _SLO_NAME.fullmatch(name.removesuffix("_ms"))
        if match is None or not float(match[2]) > 0 or not 0 < limit < math.inf:
            raise UsageError(
                f"{named(ObjectivesOption)} {name}={limit:g}: no objective",
                hint="a positive number of ms for a percentile of ttft, itl or e2e, such as ttft_p99=500",
            )
        objectives.append(Objective(f"{match[0]}_ms", float(limit)))
    return tuple(objectives)


def _check(asked: PlanQuestion) -> None:
    is_day = asked.requests.arrivals not in get_args(_ArrivalsOption)
    if asked.rate is None and asked.servers is None and not is_day:
        raise UsageError(f"neither {named(RateOption)} nor {named(ServerCountOption)} is given")
    above_0 = math.nextafter(0, 1)
    for option, value, least, hint in (
        (named(RateOption), asked.rate, above_0, "requests per second, above 0"),
        (named(ServerCountOption), asked.servers, 1, "at least 1"),
        (named(LoadOptions, "burstiness"), asked.requests.burstiness, above_0, "above 0; 1 is Poisson"),
        (named(LoadOptions, "prompt"), asked.requests.prompt, 1, "at least 1 token"),
        (named(LoadOptions, "output"), asked.requests.output, 1, "at least 1 token"),
        (named(LoadOptions, "accept"), asked.requests.accept, 1, "at least 1 token a step"),
    ):
        if value is not None and not least <= value < math.inf:
            raise UsageError(f"{option} {value:g}: is out of range", hint=hint)
    _hits_pct(asked.requests.prefix_hits)
    if is_day and asked.requests.prefix_hits != "traced":
        raise UsageError(
            (
                f"{named(LoadOptions, 'prefix_hits')} {asked.requests.prefix_hits}: a file of arrivals has the hits of "
                "each request"
            ),
            hint="put them in its column cached_prompt_tokens",
        )
    if is_day:
        refuse_options(
            asked.objectives,
            asked.requests,
            {
                named(RateOption): asked.rate,
                named(ServerCountOption): asked.servers,
                named(LoadOptions, "burstiness"): asked.requests.burstiness,
                named(LoadOptions, "file"): asked.requests.file,
            },
        )
        return
    arrivals = asked.requests.arrivals
    if arrivals == "traced" and asked.requests.burstiness is not None:
        raise UsageError(
            f"{named(LoadOptions, 'burstiness')} {asked.requests.burstiness:g}: traced arrivals have their own bursts",
            hint=f"leave out {named(LoadOptions, 'arrivals')} traced",
        )
    if not asked.objectives and (asked.rate is None or asked.servers is None):
        rate, servers = named(RateOption), named(ServerCountOption)
        without = f"{rate} {1 if asked.rate is None else asked.rate:g} {servers} {asked.servers or 1}"
        raise UsageError(
            f"{named(ObjectivesOption)}: no objective is given, such as ttft_p99=500 and itl_p99=50",
            hint=f"{servers} and {rate} together need none: {without}",
        )


# -- one kind of server ----------------------------------------------------------------------------------


def _planned(folder: str | Path, deployment: DeploymentModels, asked: PlanQuestion) -> ServerPlan:
    """Plan one deployment; the plan has the reason where the data support none, a wrong question is an error."""
    gpus = int((deployment.limit("tensor_parallel") or 1) * (deployment.limit("pipeline_parallel") or 1))
    plan_ = ServerPlan(
        str(folder),
        deployment.deployment_id,
        gpus_per_server=gpus,
        gpu=deployment.gpu,
        **_origin(deployment),
        settings={canonical_name(name): str(value) for name, value in asked.settings.items()},
        objectives=asked.objectives,
        servers=asked.servers,
        rate_per_s=asked.rate,
    )
    changes = _changes(deployment, asked.settings)
    try:
        if asked.day is not None:
            return _for_a_day(plan_, store_beside(folder), deployment, asked, changes)
        fleet, requests, notes = _fleet(store_beside(folder), deployment, asked.requests, changes)
        replays = published_replays(folder, deployment)
        without = () if replays else (_NOT_REPLAYED,)
        plan_ = replace(
            plan_,
            arrivals=requests.arrivals,
            load=requests.load,
            drafts=requests.drafts,
            notes=(*notes, *_notes_on(requests.drafts), *without),
        )
        return _with_servers(plan_, fleet, asked, _errors(replays, _names(asked, fleet)))
    except UsageError:
        raise
    except TracefitError as error:
        return replace(plan_, reason=error.line())


def _for_a_day(
    plan_: ServerPlan,
    store: TableStore | None,
    deployment: DeploymentModels,
    asked: PlanQuestion,
    changes: Mapping[str, object],
) -> ServerPlan:
    """Plan one deployment for a file of arrivals."""
    day = asked.day
    assert day is not None  # noqa: S101 - asked by whoever calls
    server, notes = server_of(store, deployment, changes, accept=asked.requests.accept)
    longest = changes.get("max_model_len", deployment.limit("max_model_len"))
    fleet, load, refused = day_server(server, day, None if longest is None else float(str(longest)))
    replays = published_replays(plan_.folder, deployment)
    beyond = _beyond_training(deployment, {"prompt": load.prompt_tokens, "output": load.output_tokens})
    more = (*((refused,) if refused else ()), *beyond, *(() if replays else (_NOT_REPLAYED,)))
    plan_ = replace(plan_, notes=(*_limits_of(fleet), *notes, *more))
    planned = with_day(plan_, fleet, load, day, _errors(replays, _names(asked, fleet)))
    price = price_of(asked.price, planned.gpu)
    if planned.day is None or price is None:
        return planned
    each = price * planned.gpus_per_server
    hours = (planned.day.server_hours, planned.day.scaler.server_hours)
    return replace(planned, day=replace(planned.day, cost=each * hours[0], cost_scaled=each * hours[1]))


def _origin(deployment: DeploymentModels) -> dict[str, Any]:
    """Return where the model of step times comes from; it is missing where the plan says so."""
    with suppress(TracefitError):
        model = deployment.step_model
        return {"origin": model.origin, "is_tested": model.transfer is None or model.transfer.tested}
    return {}


def store_beside(folder: str | Path) -> TableStore | None:
    """Return the tables beside models; null without any."""
    try:
        return TableStore(tables_of(folder))
    except UsageError:
        return None


def _fleet(
    store: TableStore | None,
    deployment: DeploymentModels,
    requests: LoadOptions,
    changes: Mapping[str, object],
) -> tuple[Fleet, _Requests, tuple[str, ...]]:
    """Return servers with their requests, and notes on both."""
    traced, timeline = _traced(store, deployment)
    measured = measured_acceptance(traced, timeline)
    recorded = 1.0 if measured is None else measured.mean
    tokens_per_step = recorded if requests.accept is None else requests.accept
    settings, notes = _settings(deployment, timeline, tokens_per_step, changes)
    found, more = _requests(deployment, traced, requests, settings, changes)
    found = msgspec.structs.replace(found, drafts=_drafts(settings, requests, measured))
    # Other settings or lengths are another server or another load than the one that carried it.
    own = ("file", "prompt", "output", "accept")
    is_recorded = not changes and not any(getattr(requests, name) is not None for name in own)
    is_recorded &= requests.prefix_hits == "traced"
    carried_per_s = carried(traced) if is_recorded else None
    known = {
        **deployment.server,
        "max_num_seqs": float(settings.max_num_seqs),
        "max_num_batched_tokens": float(settings.max_num_batched_tokens),
        "num_gpu_blocks": None if settings.num_blocks is None else settings.num_blocks + 1.0,
        "block_size": float(settings.block_size),
    }
    server = {name: value for name, value in known.items() if value is not None}
    fleet = Fleet(deployment, server, settings, found.sample, carried_per_s=carried_per_s)
    return fleet, found, (*notes, *more)


def server_of(
    store: TableStore | None,
    deployment: DeploymentModels,
    changes: Mapping[str, object] = MappingProxyType({}),
    *,
    accept: float | None = None,
) -> tuple[Fleet, tuple[str, ...]]:
    """Return a server of a deployment without requests of its own, and notes on its settings.

    Args:
        store: The tables that the models were trained on; null without any.
        deployment: The deployment.
        changes: Those of `PLANNED_SETTINGS` that differ.
        accept: Tokens that a request gets from a step; as recorded if not given.

    Raises:
        UsageError: Models are not valid, or a limit of the scheduler is unknown.
        DataError: The model of step times is missing.
    """
    fleet, _, notes = _fleet(store, deployment, LoadOptions(prompt=1, output=1, accept=accept), changes)
    _ = fleet.times  # a model that cannot be replayed fails here
    # Notes on the lengths of this request say nothing.
    return fleet, tuple(note for note in notes if "tokens of" not in note)


class Rates(NamedTuple):
    """One server over the rate: some rates up to its capacity, and what it can carry."""

    points: tuple[PlanPoint, ...] = ()
    capacity: ServerCapacity | None = None


def rates_of(store: TableStore, models: Models, replays: Sequence[RunReplay]) -> dict[str, Rates]:
    """Return what one server of each deployment would do at rates up to its capacity, with requests like those traced.

    Deployments that cannot be replayed are left out, and those after the first `MOST_DEPLOYMENTS` of them.

    Args:
        store: Tables of the deployments' runs.
        models: Their models.
        replays: Replays of the runs: their errors are in the intervals.
    """
    rates: dict[str, Rates] = {}
    for deployment_id in models.deployment_ids:
        if len(rates) == MOST_DEPLOYMENTS:
            break
        with suppress(TracefitError):
            deployment = models.deployment(deployment_id)
            fleet, *_ = _fleet(store, deployment, LoadOptions(), {})
            names = _names_of(fleet.sample)
            errors = _errors([r for r in replays if r.deployment_id == deployment_id], names)
            points = [fleet.at(1, share * fleet.capacity) for share in _SHARES_OF_A_REPORT]
            curve = Curve(points, errors)
            capacity = ServerCapacity(fleet.capacity, curve.least, curve.most, curve.knee())
            rates[deployment_id] = Rates(plan_points(1, fleet, curve, names), capacity)
    return rates


def _with_servers(plan_: ServerPlan, fleet: Fleet, asked: PlanQuestion, errors: Mapping[str, float]) -> ServerPlan:
    objectives, names, rate = asked.objectives, _names(asked, fleet), asked.rate
    servers = asked.servers or max(1, math.ceil((rate or 0.0) / (0.8 * fleet.capacity)))
    curve = curve_of(fleet, servers, errors)
    plan_ = replace(plan_, notes=(*_limits_of(fleet), *plan_.notes))
    notes: list[str] = []
    if asked.servers is None and rate is not None:
        fewest = _fewest(fleet, curve, rate, objectives)
        if fewest is None:
            return replace(plan_, reason=_too_slow(curve, objectives), curve=plan_points(1, fleet, curve, names))
        servers, curve = fewest.servers, fewest.curve
        plan_ = replace(plan_, servers_low=fewest.low, servers_likely=fewest.likely, is_sure=fewest.is_sure)
        notes += [] if fewest.is_sure else [_NOT_SURE]
    plan_ = _with_capacity(plan_, fleet, servers, curve)
    if objectives:
        most = largest_rate(fleet, servers, errors, objectives)
        plan_ = replace(
            plan_,
            largest_rate_low=servers * most.low or None,
            largest_rate_per_s=servers * most.value or None,
            largest_rate_high=servers * most.high or None,
        )
        curve = with_anchors(curve, most.curve.anchors)
        if rate is None:
            curve, rate = most.curve, servers * most.value
            if not rate:
                points = plan_points(servers, fleet, curve, names)
                return replace(plan_, reason=_too_slow(curve, objectives), curve=points)
    rate = rate or 0.0  # without objectives it is given
    if rate > servers * curve.most * (1 + 1e-9):
        return replace(plan_, reason=_no_rate(plan_, rate), curve=plan_points(servers, fleet, curve, names))
    each = rate / servers
    if each > fleet.capacity * (1 + 1e-9):
        at = plan_point(curve.points[-1], servers, fleet, curve, names, each)
        notes.insert(0, _GROWS.format(rate=number(rate)))
    else:
        # The search for the largest rate ended with a replay at it.
        curve = curve if asked.rate is None else anchored(fleet, servers, curve, each, ANSWER_REQUESTS)
        if curve.is_saturated(np.array([each]))[0]:
            notes.insert(0, _NEAR_CAPACITY.format(rate=number(rate), share=f"{100 * SATURATED:.0f}"))
        here = min(curve.anchors, key=lambda anchor: abs(anchor.rate - each))
        at = plan_point(here, servers, fleet, curve, names, each)
        if plan_.drafts is not None:
            plan_ = replace(plan_, drafts=replace(plan_.drafts, step_mean_ms=here.step_mean_us / 1e3))
    plan_ = _reconciled(plan_, at, curve, asked)
    routed = [_ROUTED[asked.requests.router]] if servers > 1 else []
    plan_ = replace(
        plan_,
        # The curve that has no replay at the rate asked has one knee for all rates.
        knee_per_s=servers * curve_of(fleet, servers, errors).knee(),
        met=all(at.latency(o.name).keeps_to(o.limit_ms) for o in objectives) if objectives else None,
        at=at,
        curve=plan_points(servers, fleet, curve, names),
        notes=(*_outside(at), *notes, *plan_.notes, *routed),
    )
    price = price_of(asked.price, plan_.gpu)
    return plan_ if price is None else _priced(plan_, at, fleet, price)


class _Fewest(NamedTuple):
    """The fewest servers for a rate: that are surely enough, may be by the expected latencies, or by the low ends."""

    servers: int
    likely: int
    low: int
    is_sure: bool
    curve: Curve


def _fewest(fleet: Fleet, curve: Curve, rate: float, objectives: Sequence[Objective]) -> _Fewest | None:
    """Return the fewest servers that are enough at the high end of the intervals; where no number is enough there, by
    the values themselves; null where none is.
    """
    ends = (partial(Curve.largest_rate, objectives=objectives, high=high) for high in (True, None))
    found = next(filter(None, (fewest_servers(fleet, curve, rate, end) for end in ends)), None)
    if found is None:
        return None
    servers, curve = found
    is_sure = curve.largest_rate(objectives, high=True) * servers >= rate * (1 - 1e-9)
    likely = _servers(curve.largest_rate(objectives), rate, servers)
    if not (curve.has_anchor(rate / likely) or curve.is_saturated(np.array([rate / likely]))[0]):
        # A replay of as many says whether they may be enough; near the capacity none does.
        curve = anchored(fleet, likely, curve, rate / likely)
        likely = _servers(curve.largest_rate(objectives), rate, servers)
    low = _servers(curve.largest_rate(objectives, high=False), rate, likely)
    return _Fewest(servers, likely, low, is_sure, curve)


def _reconciled(plan_: ServerPlan, at: PlanPoint, curve: Curve, asked: PlanQuestion) -> ServerPlan:
    """Return a plan whose largest rate is not below the rate asked about if the objectives hold there, nor above it if
    they do not: the replay at that rate is the longer one.
    """
    servers, objectives, rate = plan_.servers or 1, asked.objectives, asked.rate
    if not objectives or rate is None:
        return plan_
    ends = (plan_.largest_rate_low, plan_.largest_rate_per_s, plan_.largest_rate_high)
    low, value, high = (end or 0.0 for end in ends)
    latencies = [(at.latency(o.name), o.limit_ms) for o in objectives]
    if all(one.keeps_to(limit) for one, limit in latencies):
        if 0 < high < rate:
            # With fuller batches a percentile may fall again.
            return replace(plan_, notes=(_NOT_BELOW.format(rate=number(rate)), *plan_.notes))
        value = max(value, rate)
        if all(one.high is not None and one.high <= limit for one, limit in latencies):
            low = max(low, rate)
        elif low > rate:
            low = servers * curve.largest_rate(objectives, high=True)
    elif value > rate:
        value = servers * curve.largest_rate(objectives)
    return replace(
        plan_,
        largest_rate_low=min(low, value) or None,
        largest_rate_per_s=value or None,
        largest_rate_high=max(high, value) or None,
    )


def _with_capacity(plan_: ServerPlan, fleet: Fleet, servers: int, curve: Curve) -> ServerPlan:
    """Add a number of servers, their capacity with its ends, and what as many recorded ones carried."""
    return replace(
        plan_,
        servers=servers,
        capacity_per_s=servers * fleet.capacity,
        capacity_low=servers * curve.least,
        capacity_high=servers * curve.most,
        carried_per_s=None if fleet.carried_per_s is None else servers * fleet.carried_per_s,
    )


def _no_rate(plan_: ServerPlan, rate: float) -> str:
    """Return why some servers cannot serve a rate."""
    ends = (number(plan_.capacity_low), number(plan_.capacity_high))
    between = f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else ""
    return (
        f"the capacity of {plural(plan_.servers or 1, 'server')} is {number(plan_.capacity_per_s)} requests per "
        f"second{between}: at {number(rate)} their queues only grow"
    )


def _priced(plan_: ServerPlan, at: PlanPoint, fleet: Fleet, price: float) -> ServerPlan:
    """Add the cost of a million tokens."""
    gpus = plan_.gpus_per_server * (plan_.servers or 1)
    per_million = 1e6 * price * gpus / 3600 / at.output_tokens_per_s
    of_output = float(fleet.sample.output_tokens.mean())
    share = of_output / (of_output + float(fleet.sample.prompt_tokens.mean()))
    return replace(plan_, cost_per_million_output_tokens=per_million, cost_per_million_tokens=per_million * share)


def _limits_of(fleet: Fleet) -> Iterator[str]:
    """Yield where the models contradict the recording, and how much the machine's speed changed in it."""
    if fleet.pace < 1:
        yield (
            f"the models contradict the recording: by them one server serves {number(fleet.modelled_capacity)} "
            f"requests per second, and it carried {number(fleet.capacity)}: that is the bound, and all step times are "
            f"{percent(100 * (1 - fleet.pace))} % shorter"
        )
    model = fleet.deployment.step_model
    if (speed := model.validation and model.validation.speed) and speed.adjusted:
        yield f"{speed_text(speed)}: the intervals hold for such changes, not for a machine of quite another speed"


def _names_of(sample: TrafficSample, more: Iterable[str] = ()) -> tuple[str, ...]:
    # With one token there is no time between two.
    has_itl = np.percentile(sample.output_tokens, 95) > 1
    return tuple(n for n in dict.fromkeys((*_SLO_POINTS, *more)) if has_itl or not n.startswith("itl"))


def _names(asked: PlanQuestion, fleet: Fleet) -> tuple[str, ...]:
    kept = _names_of(fleet.sample, (o.name for o in asked.objectives))
    transfer = fleet.deployment.step_model.transfer
    if transfer is not None and not transfer.has_prompts:
        # The cost of a prompt is only a prior: the time to the first token is a guess, and E2E has it.
        kept = tuple(name for name in kept if name.startswith("itl"))
        if lost := [o.name for o in asked.objectives if o.name not in kept]:
            raise DataError(
                f"{named(ObjectivesOption)} {lost[0].removesuffix('_ms')}: no source of this server's model has steps "
                "with prompts, so that only ITL is planned",
                hint=(
                    "give a source with prompts, or some minutes of the server's traces: `tracefit transfer … "
                    f"{flag_of(CalibrateOption)}`"
                ),
            )
    if lost := [o.name for o in asked.objectives if o.name not in kept]:
        raise UsageError(
            f"{named(ObjectivesOption)} {lost[0].removesuffix('_ms')}: nearly every request has one output token, "
            "and no ITL"
        )
    return kept


def _servers(largest: float, rate: float, most: int) -> int:
    """Return the fewest servers, `most` at most, that serve a rate if one serves `largest`."""
    return min(most, math.ceil(rate / largest - 1e-9)) if largest else most


def _too_slow(curve: Curve, objectives: Sequence[Objective]) -> str:
    lowest = curve.rates[:1]
    missed = ", ".join(
        f"{o.name.removesuffix('_ms')} is {number(ms)} ms, not {number(o.limit_ms)}"
        for o in objectives
        if (ms := float(curve.values_ms(o.name, lowest)[0])) > o.limit_ms
    )
    return f"no number of servers is enough: at {number(lowest[0])} requests per second on one, {missed}"


def _outside(at: PlanPoint) -> tuple[str, ...]:
    if not at.extrapolates:
        return ()
    share = f"for {at.outside_pct:.0f} % of the time the steps are outside what the models were trained on"
    return (f"this rests on an extrapolation: {share} ({'; '.join(at.outside)})",)


# -- settings --------------------------------------------------------------------------------------------


def _changes(deployment: DeploymentModels, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that differ from those of the deployment.

    Raises:
        UsageError: One of them changes what the models cannot say.
    """
    changes = {}
    for key, value in settings.items():
        name = canonical_name(key)
        # Wrong kinds of values are refused here.
        settings_from({name: value}, where=named(ChangesOption))
        now = deployment.setting(name)
        if now == value:
            continue
        if name in PLANNED_SETTINGS:
            changes[name] = value
            continue
        stated = f"{name} {now}" if now is not None else f"the {name} that was recorded"
        reason = _REFUSED_SETTINGS.get(name, "no rule of the scheduler and no model reads it").format(
            now=stated, servers=named(ServerCountOption)
        )
        hint = did_you_mean(name, PLANNED_SETTINGS) or f"a plan answers for {', '.join(PLANNED_SETTINGS)}"
        raise UsageError(
            f"{named(ChangesOption)} {key}={value}: {reason}",
            hint=None if name in _REFUSED_SETTINGS else hint,
        )
    return changes


def _settings(
    deployment: DeploymentModels, timeline: pl.LazyFrame, tokens_per_step: float, changes: Mapping[str, object]
) -> tuple[EngineSettings, tuple[str, ...]]:
    """Return the scheduler's settings with the changes, and notes on them."""
    limits = ("max_num_seqs", "max_num_batched_tokens")
    stated = {name: float(str(changes[name])) for name in limits if name in changes}
    now, notes = engine_settings(deployment, timeline, tokens_per_step, stated)
    size = int(str(changes.get("block_size", now.block_size)))
    total = now.num_blocks
    if total is not None and size != now.block_size:
        total = total * now.block_size // size
    if "num_gpu_blocks" in changes:
        # vLLM never hands out one of the blocks.
        total = int(str(changes["num_gpu_blocks"])) - 1
    made = msgspec.structs.replace(
        now,
        block_size=size,
        num_blocks=total,
        chunked_prefill=bool(changes.get("enable_chunked_prefill", now.chunked_prefill)),
        prefix_caching=bool(changes.get("enable_prefix_caching", now.prefix_caching)),
    )
    more = [] if total is not None else ["the number of KV blocks is not known: here memory never runs out"]
    if made.prefix_caching and not now.prefix_caching:
        more.append("the traces hold no prefix-cache hits: a plan with the cache on has none either")
    return made, (*notes, *more)


# -- the load --------------------------------------------------------------------------------------------


def _traced(store: TableStore | None, deployment: DeploymentModels) -> tuple[pl.DataFrame, pl.LazyFrame]:
    """Return the complete requests of a deployment's runs with the share that was traced, and its steps; empty without
    tables.
    """
    training = deployment.step_model.training
    runs = sorted(set(training.runs if training else ()) & set(store.runs() if store else ()))
    if store is None or not runs:
        return TABLES["requests"].empty(), TABLES["timeline"].empty().lazy()
    return complete_requests(store, runs), store.scan("timeline", runs)


def _give_requests() -> str:
    prompt, output, file = (named(LoadOptions, name) for name in ("prompt", "output", "file"))
    return f"give {prompt} and {output}, or {file}"


class _Requests(msgspec.Struct, frozen=True):
    """Requests to draw from, and their description."""

    sample: TrafficSample
    load: PlannedLoad
    arrivals: PlannedArrivals
    drafts: PlannedDrafts | None = None


def _requests(
    deployment: DeploymentModels,
    traced: pl.DataFrame,
    options: LoadOptions,
    settings: EngineSettings,
    changes: Mapping[str, object],
) -> tuple[_Requests, tuple[str, ...]]:
    """Return what requests are drawn from, and notes on it."""
    rows, source, engines = _rows(traced, options)
    notes: list[str] = []
    longest = changes.get("max_model_len", deployment.limit("max_model_len"))
    if longest is not None:
        fit = rows.filter(pl.col("prompt") + pl.col("output") <= float(str(longest)))
        if lost := rows.height - fit.height:
            notes.append(f"{lost} of {rows.height} requests are longer than max_model_len: the server refuses them")
        rows = fit
    if not rows.height:
        too_long = f": every one is longer than max_model_len, {longest:,} tokens" if notes else ""
        raise UsageError(f"no request is left to plan for{too_long}", hint=_give_requests())
    arrivals, gaps = _arrivals(engines, options)
    rows = _with_hits(rows, options.prefix_hits, settings)
    share = 100 * float(rows.select(pl.col("cached").sum() / pl.col("prompt").sum()).item())
    if settings.prefix_caching and (share or options.prefix_hits != "traced"):
        origin = "those traced" if options.prefix_hits == "traced" else "as given"
        notes.append(f"prefix-cache hits are {origin}, {share:.0f} % of the prompt tokens")
    prompt, output, cached = (rows[n].cast(pl.Int64).to_numpy() for n in ("prompt", "output", "cached"))
    # Traced lengths need no note: some of them are after the training part.
    if not source.endswith("traced requests"):
        notes += _beyond_training(deployment, {"prompt": prompt, "output": output})
    # Lengths from a file or from options are not a sample: they are the load itself.
    is_sample = options.file is None and None in (options.prompt, options.output)
    in_turn = options.router != "random"
    sample = TrafficSample(prompt, output, cached, gaps, arrivals.shape or 1.0, is_sample, in_turn)
    spans = [1e9 * (len(at) - 1) / float(np.ptp(at)) for at in engines if len(at) > 1 and np.ptp(at) > 0]
    rate = float(np.mean(spans)) if spans and options.file is None else None
    hit_pct = share if settings.prefix_caching else 0.0
    load_ = PlannedLoad(source, float(prompt.mean()), float(output.mean()), rate, hit_pct)
    return _Requests(sample, load_, arrivals), tuple(notes)


def _beyond_training(deployment: DeploymentModels, lengths: Mapping[str, Integers]) -> list[str]:
    """Return notes on prompts and outputs that leave those of the requests in training."""
    return [
        f"{name} tokens of {low:g} to {high:g} leave those of the requests in training, {ends[0]:g} to {ends[1]:g}"
        for name, column in lengths.items()
        for ends in [deployment.input_ranges("request").get(f"{name}_tokens")]
        for low, high in [(float(column.min()), float(column.max()))]
        if ends is not None and not (ends[0] <= low and high <= ends[1])
    ]


def _arrivals(engines: Sequence[Integers], options: LoadOptions) -> tuple[PlannedArrivals, Vector | None]:
    """Return when requests come, and gaps to draw from, which only traced arrivals have.

    Raises:
        DataError: Traced arrivals are asked for, and too few are known.
    """
    if options.burstiness is not None:
        kind: Literal["poisson", "gamma"] = "poisson" if options.burstiness == 1 else "gamma"
        return PlannedArrivals(kind, options.burstiness, is_given=True), None
    found = burstiness(engines)
    known = (found.dispersion, found.sd) if found.gaps else (None, None)
    if options.arrivals == "traced":
        gaps = np.concatenate([relative_gaps(at) for at in engines]) if engines else np.zeros(0)
        if len(gaps) < GAP_BLOCK:
            raise DataError(
                (
                    f"{len(gaps)} gaps between arrivals at steady rates are known, {GAP_BLOCK} are needed to draw "
                    "traced arrivals"
                ),
                hint=f"leave out {named(LoadOptions, 'arrivals')} traced, or give {named(LoadOptions, 'burstiness')}",
            )
        return PlannedArrivals("traced", None, False, *known), gaps
    kind = "gamma" if found.differs else "poisson"
    return PlannedArrivals(kind, found.shape, False, *known), None


def _rows(traced: pl.DataFrame, options: LoadOptions) -> tuple[pl.DataFrame, str, list[Integers]]:
    """Return lengths (`prompt`, `output`, `cached`), where they come from, and the arrivals at each engine in ns, if
    they are known.
    """
    engines: list[Integers] = []
    if options.file is not None:
        rows, engines = _of_file(Path(options.file))
        source = f"requests of {Path(options.file).name}"
    elif traced.height:
        rows = traced.select(
            prompt="prompt_tokens", output="output_tokens", cached=pl.col("cached_prompt_tokens").fill_null(0)
        ).with_columns(pl.col("prompt", "output").clip(lower_bound=1))
        source = f"{traced.height:,} traced requests"
        # A sample has gaps between requests that are not neighbours.
        if is_whole(traced):
            engines = [part["arrival_ns"].sort().to_numpy() for part in traced.partition_by(*ENGINE)]
    elif options.prompt is not None and options.output is not None:
        rows = pl.DataFrame({"prompt": [1], "output": [1], "cached": [0]})
        source = ""
    else:
        # Of several kinds of servers, others may have requests.
        raise DataError("no requests are traced here", hint=_give_requests())
    fixed = {n: v for n, v in (("prompt", options.prompt), ("output", options.output)) if v is not None}
    rows = rows.with_columns(pl.lit(v).alias(n) for n, v in fixed.items())
    rows = rows.with_columns(cached=pl.min_horizontal("cached", pl.col("prompt") - 1))
    stated = ", ".join(f"{name} of {value:,} tokens" for name, value in fixed.items())
    return rows, ", ".join(filter(None, (source, stated))), engines


def _hits_pct(stated: str) -> float | None:
    """Return the stated share of prompt tokens in the prefix cache, in percent; null for `traced`.

    Raises:
        UsageError: It is something else.
    """
    if stated in ("traced", "none"):
        return 0.0 if stated == "none" else None
    with suppress(ValueError):
        if 0 <= (pct := float(stated)) < 100:
            return pct
    raise UsageError(
        f"{named(LoadOptions, 'prefix_hits')} {stated}: is not a share of the prompt tokens",
        hint="give traced, none, or percent from 0 up to 100",
    )


def _with_hits(rows: pl.DataFrame, stated: str, settings: EngineSettings) -> pl.DataFrame:
    """Return the requests with the stated share of each prompt in the prefix cache, in whole blocks."""
    pct = _hits_pct(stated)
    if pct is None:
        return rows
    if pct and not settings.prefix_caching:
        raise UsageError(
            f"{named(LoadOptions, 'prefix_hits')} {stated}: the server has no prefix cache",
            hint=f"add {named(ChangesOption)} enable_prefix_caching=true",
        )
    block = settings.block_size
    cached = (pl.col("prompt") * pct / 100 / block).floor().cast(pl.Int64) * block
    return rows.with_columns(cached=pl.min_horizontal(cached, pl.col("prompt") - 1))


def _drafts(settings: EngineSettings, options: LoadOptions, measured: Acceptance | None) -> PlannedDrafts | None:
    """Return the speculative decoding of a plan; null without."""
    if settings.tokens_per_step == 1 and measured is None:
        return None
    mean, p10, p90 = measured or (None, None, None)
    return PlannedDrafts(settings.tokens_per_step, options.accept is not None, mean, p10, p90, None)


def _notes_on(drafts: PlannedDrafts | None) -> Iterator[str]:
    if drafts is None or not drafts.is_given:
        return
    if drafts.measured is None:
        yield (
            "the steps were recorded without drafts, so that the time to make and to verify them is in none: with "
            f"{number(drafts.tokens_per_step)} tokens a step, latencies are at least these"
        )
    else:
        yield (
            f"a step gave each request {number(drafts.measured)} tokens in the recording, not "
            f"{number(drafts.tokens_per_step)}"
        )


def _of_file(path: Path) -> tuple[pl.DataFrame, list[Integers]]:
    frame = read_rows(path)
    needed = ("prompt_tokens", "output_tokens")
    wrong = [n for n in needed if n not in frame.columns or not frame[n].dtype.is_numeric()]
    if wrong:
        raise UsageError(f"has no column {wrong[0]} of numbers", where=str(path))
    if frame.select(pl.any_horizontal((pl.col(*needed) < 1) | pl.col(*needed).is_null()).any()).item():
        raise UsageError("has requests with fewer than 1 token", where=str(path))
    cached = pl.col("cached_tokens").fill_null(0) if "cached_tokens" in frame.columns else pl.lit(0)
    rows = frame.select(prompt="prompt_tokens", output="output_tokens", cached=cached)
    if "arrival_s" not in frame.columns:
        return rows, []
    at = np.sort(frame["arrival_s"].cast(pl.Float64, strict=False).drop_nulls().to_numpy())
    return rows, [(1e9 * at).astype(np.int64)]


# -- errors of the replays of recorded runs --------------------------------------------------------------


def _errors(replays: Sequence[RunReplay], names: Iterable[str]) -> dict[str, float]:
    """Return name of a percentile to the largest factor by which replays were off, at the nearest measured
    percentile.
    """
    factors = {}
    for name in names:
        latency, _, q = name.removesuffix("_ms").partition("_p")
        nearest = min((50, 90, 99), key=lambda p: abs(p - float(q)))
        off = [e for r in replays if (e := r.errors.get(f"{latency}_p{nearest}_us")) is not None]
        factors[name] = max((math.exp(abs(math.log1p(max(e, -99.0) / 100))) for e in off), default=1.0)
    return factors
