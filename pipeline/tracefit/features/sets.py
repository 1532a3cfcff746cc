"""Feature sets: the features a model is offered, declared as formulas over a frame's columns and a run's constants.

A coefficient file names features by these names, and a consumer computes them by these formulas. The built-in sets are
below; a user's own set comes from a file with the same fields and is compiled the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints

from tracefit.errors import UsageError, known_names
from tracefit.evaluator import MAX_FORMULA_CHARS
from tracefit.models.columns import with_formulas
from tracefit.models.formulas import Name, names_in, parse_formula
from tracefit.server.documents import (
    FiniteNumber,
    Text,
    excerpt,
    parse_json_object,
    parse_yaml_object,
    printable_text,
    read_bytes,
    validated,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import polars as pl

Sign = Literal["non_negative"]

_RATIO = "efficiency_ratio"
_RATIO_DIGITS = 6

_DIMENSIONLESS = frozenset({"1", "ratio", "flag"})


def _is_identifier(text: str) -> str:
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,79}", text):
        raise ValueError(f"{excerpt(text)!r} is not a plain identifier: at most 80 letters, digits and _")
    return text


def _is_formula(text: str) -> str:
    try:
        parse_formula(text, where="")
    except UsageError as error:
        raise ValueError(error.what.removeprefix("formula ")) from None
    return text


def _number_as_text(value: object) -> object:
    """Return a number as text: YAML reads the unit 1 and the formula 1 as numbers."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True, slots=True)
class Feature:
    """One number about a step or a request.

    Attributes:
        name: Name in coefficient files, a plain identifier.
        unit: Unit of its values: `token`, `request`, `us`, `1` for none, …
        formula: How it is computed, in the language of `expressions`.
        reason: Why it should matter.
        sign: Sign of its coefficient by physics: time per token, per request or per byte is not negative.
            None if physics does not decide.
        shrunk: Whether it corrects other features where they fall short: its coefficient is drawn to zero.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Annotated[Text, AfterValidator(_is_identifier)]
    unit: Annotated[Text, StringConstraints(max_length=40), BeforeValidator(_number_as_text)]
    formula: Annotated[
        Text,
        StringConstraints(max_length=MAX_FORMULA_CHARS),
        AfterValidator(_is_formula),
        BeforeValidator(_number_as_text),
    ]
    reason: Annotated[str, StringConstraints(strict=True, max_length=400), AfterValidator(printable_text)] = ""
    sign: Sign | None = None
    shrunk: bool = False

    @property
    def is_tuned(self) -> bool:
        """Whether its formula has a ratio that training chooses."""
        return _RATIO in self.formula

    @property
    def coefficient_unit(self) -> str:
        """Unit of its coefficient in a model of microseconds: `us/token`, `us`, or `1` for a roofline term."""
        if self.unit == "us":
            return "1"
        return "us" if self.unit in _DIMENSIONLESS else f"us/{self.unit}"


def _named_once(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
    [(name, count)] = Counter(feature.name for feature in features).most_common(1)
    if count > 1:
        raise ValueError(f"have the feature {name} twice")
    return features


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Features in order of preference: if two carry the same information, the later one is left out.

    Attributes:
        name: Its name.
        features: The features.
        ratios: Candidates for `efficiency_ratio` in its formulas: training chooses one and inserts the number.
        defining: Features without which it is another set: where a model has none of them, it does not compete. Nor
            does it where one of them is in us, a time at the GPU's peak, and has a coefficient below 1.
        is_relative: Whether a fit minimises errors in proportion to the time, so that short steps count as much as long
            ones.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Annotated[Text, StringConstraints(max_length=80)]
    features: Annotated[tuple[Feature, ...], Field(min_length=1, max_length=200), AfterValidator(_named_once)]
    ratios: Annotated[tuple[Annotated[FiniteNumber, Field(gt=0)], ...], Field(max_length=50)] = ()
    defining: Annotated[tuple[Text, ...], Field(max_length=200)] = ()
    is_relative: bool = False

    def at(self, ratio: float) -> FeatureSet:
        """Return the set with a number for `efficiency_ratio`."""
        features = tuple(
            replace(f, formula=f.formula.replace(_RATIO, f"{ratio:.{_RATIO_DIGITS}g}")) for f in self.features
        )
        return replace(self, features=features, ratios=())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return tuple(feature.name for feature in self.features)


# -- use -------------------------------------------------------------------------------------------------


def add_features(frame: pl.DataFrame, features: FeatureSet, constants: Mapping[str, float | None]) -> pl.DataFrame:
    """Add one Float64 column per feature to a frame.

    Args:
        frame: One row per step or request.
        features: The features to add; a column of the same name is replaced by its own values as Float64.
        constants: Values that are the same for every row, by name; null if unknown. A column of the same name wins.

    Raises:
        UsageError: A formula needs a name that is neither a column nor a constant, or a column that is not numeric,
            or a feature has the name of a column with other values.
    """
    schema = frame.schema
    fixed = {name: value for name, value in constants.items() if name not in schema}
    nodes = {}
    for feature in features.features:
        where = f"feature {feature.name} of set {features.name}"
        node = _parsed(feature.formula, where=where)
        for name in sorted(names_in(node)):
            if name not in schema and name not in fixed:
                hint = known_names(name, sorted({*schema, *fixed}), most=3)
                raise UsageError(f"needs {excerpt(name)}, which is not known", where=where, hint=hint)
            dtype = schema.get(name)
            # A column of text would silently cast to nulls: all rows would lack the feature.
            if dtype is not None and not (dtype.is_numeric() or str(dtype) in {"Boolean", "Null"}):
                raise UsageError(f"{name} is a column of {dtype}, not of numbers", where=where)
        if feature.name in schema and node != Name(feature.name):
            fault = "has the name of a column and other values"
            raise UsageError(fault, where=where, hint="rename the feature")
        nodes[feature.name] = node
    return with_formulas(frame, nodes, fixed)


# Sets are compiled for every deployment, split and search step: their formulas stay the same.
_parsed = lru_cache(maxsize=1024)(parse_formula)


# -- files -----------------------------------------------------------------------------------------------


def is_feature_file(choice: str) -> bool:
    """Return whether a choice of features names a file, not a built-in set."""
    return Path(choice).suffix.lower() in {".yaml", ".yml", ".json"}


def feature_sets(choice: str) -> tuple[FeatureSet, ...]:
    """Return the feature sets of a choice: `auto`, a built-in set's name, or a YAML or JSON file.

    Raises:
        UsageError: No such set or file, or the file is wrong; the line names the existing sets.
    """
    if choice == "auto":
        return AUTO
    if is_feature_file(choice):
        path = Path(choice)
        is_json = path.suffix.lower() == ".json"
        return (parse_feature_set(read_bytes(path), where=str(path), is_json=is_json),)
    if choice not in BUILT_IN:
        fault = f"feature set {excerpt(choice)!r} is not known"
        raise UsageError(fault, hint=f"{known_names(choice, BUILT_IN)}; or give a .yaml or .json file")
    return (BUILT_IN[choice],)


def parse_feature_set(content: bytes | str, *, where: str, is_json: bool = False) -> FeatureSet:
    """Parse a user's own feature set, YAML or JSON. Formulas are checked here, names when the set is used.

    The file holds `name` and `features`, a list of objects with `name`, `unit`, `formula` and optionally `reason` and
    `sign` (`non_negative`); and optionally `ratios`, numbers to try for the name `efficiency_ratio` in formulas.

    Raises:
        UsageError: A field is missing, unknown or of the wrong type; a name occurs twice; a formula is wrong.
    """
    read = parse_json_object if is_json else parse_yaml_object
    return validated(FeatureSet, {"name": "custom", **read(content, where=where)}, where=where)


# -- built-in sets ---------------------------------------------------------------------------------------


def _features(table: str) -> tuple[Feature, ...]:
    """Return the features of a table: name (+: its sign is non-negative), unit, reason, formula unless a column."""
    features = []
    for row in table.splitlines():
        signed_name, unit, reason, *formula = (cell.strip() for cell in row.split("|"))
        name = signed_name.removeprefix("+ ")
        # Free signs fit a few permille better within the training load and run away beyond it: -33 us per
        # prefill token on one H100 run.
        sign: Sign | None = None if name == signed_name else "non_negative"
        features.append(Feature(name, unit, "".join(formula) or name, reason, sign))
    return tuple(features)


_CONFIGURATION = _features("""\
  tensor_parallel        | rank      | work and weights are divided over ranks
  size_proxy             | element   | hidden size times layers, a measure of model size
  kv_bytes_per_token     | byte      | how fast the cache fills and how much is read
  is_moe                 | flag      | with experts, the weights that are read depend on the batch
  compute_to_bandwidth   | FLOP/byte | the work per byte at which compute takes longer than memory
  gpu_memory_gb          | GB        | room for the KV cache
  max_num_seqs           | request   | caps concurrent requests
  max_num_batched_tokens | token     | caps the tokens of a step
""")

# A ratio is not an amount of work, but prefill_share grows with one: with a coefficient below 0, a prompt
# would shorten a step.
BATCH = FeatureSet(
    "batch",
    (
        *_features("""\
+ prefill_tokens            | token       | prefill is bound by compute per token
+ num_prefill_reqs          | request     | per-request cost of a prefill
+ num_decode_reqs           | request     | per-request cost of a decode
+ context_tokens            | token       | decode reads the cache of its requests
+ kv_usage_ratio            | ratio       | memory pressure; stands for the cache read if that is unknown
+ decode_tokens             | token       | usually one per decoding request
+ decode_tokens_x_kv_blocks | token*block | decode is bound by reading the cache | decode_tokens * kv_blocks_used
+ prefill_share             | 1           | share of prefill in the step's tokens; 0 without tokens | prefill_tokens / (prefill_tokens + decode_tokens)
+ first_decode_reqs         | request     | with scheduling a step ahead, a prompt executes one cycle later, in which its first decode counts as a prefill of one token | num_prefill_reqs * max(0, 1 + num_prefill_reqs - prefill_tokens)
+ running_depth             | request     | batch size in requests
+ scheduled_tokens          | token       | total work of the step | prefill_tokens + decode_tokens
+ prefill_tokens_x_layers   | token*layer | distinguishes models if there are several | prefill_tokens * layers
"""),
        *_CONFIGURATION,
    ),
)
"""The specification's first set for beta: the batch of a step, and the server that runs it."""

PRODUCTS = _features("""\
+ prefill_tokens_squared           | token*token     | attention within a prompt grows with its square | prefill_tokens ** 2
+ num_decode_reqs_squared          | request*request | a large batch outgrows the hardware | num_decode_reqs ** 2
  prefill_tokens_x_num_decode_reqs | token*request   | prompts and decodes in one step share the hardware, which hides part of one behind the other | prefill_tokens * num_decode_reqs
""")
"""Products of a step's columns, offered to a model of step times only if cross-validation chooses them."""

BATCH_PRODUCTS = FeatureSet("batch+products", (*BATCH.features, *PRODUCTS))

POWER_EXPONENT = 0.85
"""A batch twice as large costs 1.8 times as much. Exponents of 0.8 to 0.85 had the smallest errors, between 0.6 and 1,
in most recordings of one server on a CPU, whose matrix products use the machine better in larger batches."""

POWER = FeatureSet(
    "power",
    _features(f"""\
+ prefill_tokens         | token   | each prompt token is computed
+ prompt_step            | 1       | a step with prompts takes another path than one without | min(1, num_prefill_reqs)
+ num_prefill_reqs       | request | per-request cost of a prefill
+ num_decode_reqs_power  | request**{POWER_EXPONENT:g} | each further request of a batch costs less | num_decode_reqs ** {POWER_EXPONENT:g}
+ context_tokens         | token   | decode reads the cache of its requests
+ prefill_context_tokens | token   | a prompt reads the cache of the tokens before it
"""),
    defining=("num_decode_reqs_power",),
)
"""The work of a step on a machine that larger batches use better."""

ROOFLINE = FeatureSet(
    "roofline",
    _features("""\
+ prefill_compute_us  | us      | time for the FLOPs of the prompt tokens at the GPU's peak
+ decode_compute_us   | us      | time for the FLOPs of the generated tokens at the GPU's peak
+ prefill_kv_write_us | us      | time to write the cache at memory bandwidth
+ decode_kv_read_us   | us      | time to read the cache at memory bandwidth
+ weight_read_us      | us      | time to read the weights that every step needs
+ tp_comm_us          | us      | time of two all-reduces per layer over the link
+ moe_expert_read_us  | us      | time to read the experts that the batch is expected to use
+ moe_dispatch_us     | us      | time to move tokens to their experts and back
+ layers              | layer   | launch overhead per layer
+ batch_requests      | request | overhead per request
"""),
    defining=("decode_kv_read_us",),
)
"""The terms of `roofline.add_roofline`; the constant is the model's intercept."""

ROOFLINE_MAX = FeatureSet(
    "roofline_max",
    (
        *_features("""\
+ step_bound_us | us | a step takes as long as the longer of compute and memory, which no sum expresses | max(efficiency_ratio * (prefill_compute_us + decode_compute_us), weight_read_us + moe_expert_read_us + decode_kv_read_us + prefill_kv_write_us)
"""),
        # The other terms are within the bound; these come on top of it.
        *(f for f in ROOFLINE.features if f.name in ("tp_comm_us", "moe_dispatch_us", "batch_requests")),
    ),
    # 0.5 to 4 in steps of 19 %: the coefficient takes up the scale, so that only the ratio of the two is searched.
    ratios=tuple(2 ** (k / 4) for k in range(-4, 9)),
    defining=("step_bound_us",),
)
"""The larger of compute and memory over the step. The ratio is how much more of its peak memory reaches than
compute."""

WORK_MAX = FeatureSet(
    "work_max",
    _features("""\
+ step_bound_mflop        | MFLOP           | a step takes as long as the longer of compute and memory, which no sum expresses | max(prefill_mflop + decode_mflop, efficiency_ratio * (weight_kb + expert_kb + kv_read_kb + kv_write_kb))
+ num_prefill_reqs        | request         | per-request cost of a prefill
+ num_decode_reqs         | request         | per-request cost of a decode
+ num_decode_reqs_squared | request*request | a large batch outgrows the hardware | num_decode_reqs ** 2
"""),
    ratios=tuple(1e-3 * 2.0**k for k in range(9)),
    defining=("step_bound_mflop",),
)
"""The same from facts of the architecture only, for an unknown GPU. The ratio is how many 10^6 FLOPs the machine does
while it reads 10^3 bytes: 1 to 256 FLOP per byte."""

_DECODES = _features("""\
+ experts_read           | expert  | a step reads the weights of the experts that its decodes are routed to; a prompt is routed to all experts
+ padded_experts_read    | expert  | the same for the padded batch
+ num_decode_reqs        | request | per-request cost of a decode
+ padded_decode_reqs     | request | a batch without prompts is padded to the size of a captured CUDA graph
""")
PADDED_OF = {"padded_experts_read": "experts_read", "padded_decode_reqs": "num_decode_reqs"}
"""Features of the padded batch, and those of its requests. With both, whose coefficients are not negative, an empty
slot of a graph costs between nothing and as much as a request."""


def _size_classes() -> Iterator[Feature]:
    """Yield a flag for each class of decode batches up to a power of two, 512 at most.

    A kernel is chosen by the size of a batch, so that a step is longer or shorter than a line has it at all sizes of a
    class. The classes are corrections to the line. Without training batches of a class only the line predicts it.
    """
    reason = "batches of this size without prompts run other kernels"
    for most in (2**k for k in range(10)):
        least = most // 2 + 1
        name = f"decodes_{least}_to_{most}" if least < most else f"decodes_{most}"
        within = f"min(1, max(0, num_decode_reqs - {least - 1})) - min(1, max(0, num_decode_reqs - {most}))"
        yield Feature(name, "1", f"(1 - min(1, num_prefill_reqs)) * ({within})", reason, shrunk=True)


LINE = FeatureSet(
    "line",
    # Small batches cannot separate experts from requests, and a line over requests only fails beyond them.
    (
        *_DECODES,
        *_features("""\
+ prefill_tokens         | token   | each prompt token is computed
+ context_tokens         | token   | decode reads the cache of its requests
+ prompt_step            | 1       | a step with prompts does not run as one CUDA graph | min(1, num_prefill_reqs)
+ num_prefill_reqs       | request | per-request cost of a prefill
+ prefill_context_tokens | token   | a prompt reads the cache of the tokens before it
"""),
    ),
    defining=tuple(feature.name for feature in _DECODES),
    is_relative=True,
)
"""Relative non-negative least squares on the work of a step: no other set may be worse."""

LINES = (LINE, replace(LINE, name="line+sizes", features=(*LINE.features, *_size_classes())))
"""The same with corrections by the size of the batch."""

_HAS_PROMPT = "min(1, num_prefill_reqs)"
MOST_CAPTURED = 512
"""Tokens up to which vLLM captures the pieces of a step with prompts as CUDA graphs: more of its launches are then the
GPU's own."""
_IS_SMALL = f"min(1, max(0, {MOST_CAPTURED + 1} - (prefill_tokens + decode_tokens)))"

LAW_SET = FeatureSet(
    "law",
    _features(f"""\
+ one                     | 1             | work of a step that no size changes
+ kernels                 | kernel        | each kernel starts and ends, however little it computes
+ all_reduces             | all-reduce    | each all-reduce waits for the slowest rank, however little it moves
+ weight_read_us          | us            | time to read the weights that every step needs
+ moe_expert_read_us      | us            | time to read the experts that the batch is expected to use
+ narrow_expert_read_us   | us            | the same for experts of fewer than 8 bits, which are unpacked on the way
+ decode_kv_read_us       | us            | time to read the cache at memory bandwidth
+ prompt_matrix_us        | us            | time for the FLOPs of prompt tokens in matrices at the GPU's peak
+ prompt_attention_us     | us            | time for the FLOPs of prompt tokens in attention at the GPU's peak
+ decode_matrix_us        | us            | time for the FLOPs of generated tokens in matrices at the GPU's peak
+ tp_comm_us              | us            | time of the all-reduces over the link
+ prompt_kernels          | kernel        | a step with prompts runs further kernels | {_HAS_PROMPT} * kernels
+ batch_requests          | request       | overhead per request
+ layers_x_graph_requests | layer*request | each layer works on each slot of a captured batch | layers * graph_requests
+ launched_small          | kernel        | launches of a step that is captured in pieces | {_HAS_PROMPT} * {_IS_SMALL} * kernels
+ launched_large          | kernel        | launches of a step that is not captured | {_HAS_PROMPT} * (1 - {_IS_SMALL}) * kernels
"""),
    defining=("prompt_matrix_us",),
    is_relative=True,
)
"""The terms of the law across servers (`features.law`), here as a line of one of them."""

_WORKLOAD = _features("""\
  max_tokens         | token | largest output that the request allows
  prefix_hit_ratio   | ratio | prompt tokens found in the cache need no prefill
  arrival_rate_per_s | 1/s   | rate of arrivals in the 10 s before the request
  state_age_us       | us    | time since the last scheduling decision
""")
"""Features of a request and of the load when it arrives."""

QUEUE = FeatureSet(
    "queue",
    (
        *_features("""\
+ outputs_ahead                  | token   | output tokens of the requests ahead
+ running_remaining_tokens       | token   | slots and blocks come free when running requests end
  waiting_depth                  | request | length of the queue when the request came
  kv_usage_ratio                 | ratio   | KV cache pressure
+ prompt_tokens                  | token   | a long prompt needs more budget and blocks
  running_depth                  | request | batch size in requests
  batch_fullness                 | ratio   | share of the slots that are taken                     | running_depth / max_num_seqs
  waiting_depth_x_kv_usage_ratio | request | a deep queue under cache pressure waits longer        | waiting_depth * kv_usage_ratio
  prompt_tokens_x_batch_fullness | token   | long prompts are harder to fit when the batch is full | prompt_tokens * running_depth / max_num_seqs
  tokens_ahead                   | token   | prompt tokens of the requests waiting ahead
"""),
        *_WORKLOAD,
        *_CONFIGURATION,
    ),
)
"""The specification's set for the queue wait: the state of the queue when the request came."""

QUEUED_FEATURES = ("outputs_ahead", "running_remaining_tokens", "prompt_tokens")
"""Features of `queue` for a request without free capacity: the work ahead of it."""

PROMPTS_AHEAD_FEATURES = ("tokens_ahead", "prompt_tokens")
"""Features of `queue` for a request that waits only for the token budget: the prompts that are computed before it."""

FREE_FEATURES = ("prompt_tokens", "running_depth")
"""Features of `queue` for a request that goes with the next step: the scheduler's own work."""

ADMISSION = FeatureSet(
    "admission",
    (
        *_features("""\
  prompt_tokens  | token   | the API tokenizes the prompt
  running_depth  | request | the wait for the step in progress grows with its batch
  prefill_tokens | token   | prompts in the step in progress make it long
  decode_tokens  | token   | decodes in the step in progress make it longer
  waiting_depth  | request | in a burst, requests also queue in the API process
"""),
        *_WORKLOAD,
    ),
)
"""ARRIVED to QUEUED without a step clock: API work and the wait for the step in progress to end."""

DEPARTURE = FeatureSet(
    "departure",
    _features("""\
  batch_requests | request | the API works through the outputs of the whole step | num_prefill_reqs + num_decode_reqs
  finishing_reqs | request | requests that finish in the same step cost more
  output_tokens  | token   | some consumers have a cost per output token
"""),
)
"""FINISHED to DEPARTED: the API process working through the outputs of the finishing step."""

NETWORK = FeatureSet(
    "network",
    _features("""\
  prompt_tokens | token   | the prompt is sent and parsed
  running_depth | request | the front end writes to every running request
"""),
)
"""The part of a client's TTFT outside the server."""

_BUILT_IN = (
    BATCH,
    POWER,
    ROOFLINE,
    ROOFLINE_MAX,
    WORK_MAX,
    *LINES,
    LAW_SET,
    QUEUE,
    ADMISSION,
    DEPARTURE,
    NETWORK,
)
BUILT_IN: Mapping[str, FeatureSet] = {feature_set.name: feature_set for feature_set in _BUILT_IN}
"""Feature sets by name."""

AUTO = (BATCH, ROOFLINE, ROOFLINE_MAX, WORK_MAX, BATCH_PRODUCTS, POWER, *LINES, LAW_SET)
"""Candidates for step times, in order of preference."""
