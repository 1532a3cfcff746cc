"""A server as vLLM's log describes it at each start: its arguments, the engine's configuration, the size of the KV
cache.

`non-default args: {'max_num_seqs': 64, …}` has what was asked for, `Initializing a V1 LLM engine (v0.32.0) with config:
…, max_seq_len=2048, tensor_parallel_size=1, …` what the engine made of it. Neither names the limits of a step if they
are the defaults, which depend on the device.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

LOG_MARKS = (
    b"args:",
    b"LLM engine (v",
    b"max_num_batched_tokens=",
    b"compile_ranges_endpoints",
    b" KV cache size: ",
    b"# GPU blocks: ",
)
"""A line that says something of the server contains one of these."""

MOST_CHARS = 64 * 1024
"""Longer lines of a log are something else, and slow for patterns."""

_MOST_PREFIX_CHARS = 512

_SPECULATION = re.compile(r"\bspeculative_config=SpeculativeConfig\(([^()]*)\)")
_DICT = re.compile(r"non-default args:\s*(\{.*\})")
_NAMESPACE = re.compile(r"\bargs: Namespace\((.*)\)")
# Bounded digits: Python raises an error for integers of more than 4,300.
_LITERAL = r"(-?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?|True|False|None|'[^'\\]*'|\"[^\"\\]*\")"
_DICT_ITEM = re.compile(rf"'(\w+)':\s*{_LITERAL}\s*(?=[,}}])")
_NAMESPACE_ITEM = re.compile(rf"\b(\w+)={_LITERAL}\s*(?=,|$)")
_BUDGET = re.compile(
    r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,9})\b|'compile_ranges_endpoints': \[(?:\d{1,9}, "
    r"){0,20}(\d{1,9})\]"
)
"""Token budget of a step, which is also the end of the last range of sizes that the engine compiles for."""
_ENGINE_LINE = re.compile(r"LLM engine \(v([\w.+-]{1,40})\) with config: (.*)")
_CACHE = re.compile(r" KV cache size: ([\d,]{1,15}) tokens")
_GPU_BLOCKS = re.compile(r"# GPU blocks: (\d{1,9})\b")

_OF_ENGINE = (
    *("max_seq_len", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "quantization"),
    *(
        "dtype",
        "kv_cache_dtype",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "device_config",
    ),
)
_ENGINE_ITEM = re.compile(rf"(?:^|, )({'|'.join(_OF_ENGINE)})=('[^'\\]*'|[\w.-]{{1,60}})(?=,|$)")

_CPU_BLOCK_TOKENS = 128
_CPU_LIMITS, _DEFAULT_LIMITS = (2_048, 128), (2_048, 256)
_LARGE_LIMITS = ((160, (16_384, 1_024)), (70, (8_192, 1_024)))
"""Token budget and slots of a server by default: on CPUs, for each rank; on other GPUs; and from so many GiB of a GPU's
memory on (vLLM 0.32, `EngineArgs.get_batch_defaults`)."""


class ServerStart(msgspec.Struct, frozen=True):
    """One start of a server, as its log describes it.

    Attributes:
        stated: Settings under vLLM's names, as far as lines name them.
        device: `cpu`, `cuda`, …; null where no line says.
        cache_tokens: Tokens that fit into the KV cache, as the server measured; null where no line says.
        cache_blocks: The same in blocks, as older versions print it.
    """

    stated: dict[str, object] = msgspec.field(default_factory=dict)
    device: str | None = None
    cache_tokens: int | None = None
    cache_blocks: int | None = None

    def defaults(self, gpu_memory_gib: float | None, *, is_a100: bool = False) -> dict[str, object]:
        """Return the limits that no line names, as vLLM chooses them for the device; empty where the device is not
        known.

        Args:
            gpu_memory_gib: Memory of the GPU; null if unknown, which counts as little.
            is_a100: Whether it is an A100, which has the limits of small GPUs.
        """
        ranks = 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if isinstance(count := self.stated.get(name), int):
                ranks *= count
        budget, slots = _DEFAULT_LIMITS
        if self.device == "cpu":
            budget, slots = (limit * ranks for limit in _CPU_LIMITS)
        elif gpu_memory_gib is not None and not is_a100:
            budget, slots = next(
                (limits for least, limits in _LARGE_LIMITS if gpu_memory_gib >= least), _DEFAULT_LIMITS
            )
        block = {"block_size": _CPU_BLOCK_TOKENS} if self.device == "cpu" else {}
        return {"max_num_batched_tokens": budget, "max_num_seqs": slots, **block} if self.device else {}


def starts_of(lines: Iterable[str]) -> list[ServerStart]:
    """Return the starts of a server that the lines of its log describe, in their order."""
    starts: list[ServerStart] = []
    has_engine = True
    for line in lines:
        if len(line) > MOST_CHARS:
            continue
        if (arguments := _arguments(line)) is not None:
            starts.append(ServerStart(arguments))
            has_engine = False
        elif (engine := _ENGINE_LINE.search(line)) is not None and (not has_engine or not starts):
            # Every engine of a server prints its configuration: the first one counts. Arguments begin the next start.
            before = starts.pop() if starts else ServerStart()
            starts.append(_with_engine(before, engine[2]))
            has_engine = True
        if starts:
            starts[-1] = _with_sizes(starts[-1], line)
    return starts


def _with_sizes(start: ServerStart, line: str) -> ServerStart:
    """Add the token budget and the size of the KV cache, if the line has them."""
    stated, cache_tokens, cache_blocks = dict(start.stated), start.cache_tokens, start.cache_blocks
    if budget := _BUDGET.search(line):
        stated.setdefault("max_num_batched_tokens", int(budget[1] or budget[2]))
    if cache_blocks is None and (blocks := _GPU_BLOCKS.search(line)):
        cache_blocks = int(blocks[1]) or None
    if cache_tokens is None and (cache := _CACHE.search(line)):
        cache_tokens = int(cache[1].replace(",", "") or 0) or None
    return ServerStart(stated, start.device, cache_tokens, cache_blocks)


def _arguments(line: str) -> dict[str, object] | None:
    # Further into a line it is the text of a request that is logged.
    if not 0 <= line.find("args:") < _MOST_PREFIX_CHARS:
        return None
    if logged := _DICT.search(line):
        return _dict(logged[1])
    if logged := _NAMESPACE.search(line):
        return _literals(_NAMESPACE_ITEM, logged[1])
    return None


def _with_engine(start: ServerStart, text: str) -> ServerStart:
    """Add what the engine's configuration says. It says what `auto` became."""
    items = {name: _word(value) for name, value in _ENGINE_ITEM.findall(text)}
    device = items.pop("device_config", None)
    dtype = items.get("dtype")
    if speculation := _SPECULATION.search(text):
        items["speculative_config"] = speculation[1]
    stated = {name: value for name, value in start.stated.items() if not (name == "dtype" and value == "auto")}
    # The argument and the configuration may spell one setting differently.
    renamed = {"max_seq_len": "max_model_len"}
    found = {renamed.get(name, name): value for name, value in items.items() if value is not None}
    if isinstance(dtype, str):
        found["dtype"] = dtype.removeprefix("torch.")
    return replace(start, stated={**found, **stated}, device=str(device) if device else None)


def _word(text: str) -> object:
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    return int(text) if text.isdigit() and len(text) < 10 else text.strip("'")


def _dict(text: str) -> dict[str, object]:
    try:
        with warnings.catch_warnings():  # an odd escape in a logged path is not the user's fault
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None  # an object's repr among the values; the plain items are read without it
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return _literals(_DICT_ITEM, text)


def _literals(item: re.Pattern[str], text: str) -> dict[str, object]:
    return {name: ast.literal_eval(literal) for name, literal in item.findall(text)}
