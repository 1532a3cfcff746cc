"""genai-perf's `profile_export.json`, which Triton's Performance Analyzer writes: responses with their times, and no
counts of tokens.

Read in genai-perf 0.0.8 and 0.0.16 (`genai_perf/profile_data_parser/llm_profile_data_parser.py`), which read the same
keys; not written by a run, for which Performance Analyzer is needed. The program counts tokens with its tokenizer when
it reads the file. Here lengths are those that the server states in `usage`, or token ids; else the parts of a stream
that have a text count as one token each, as vLLM and SGLang send them, and the prompt's length is unknown.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tracefit.inputs.formats import Recording
from tracefit.recordings.blocks import UNREADABLE_RECORD
from tracefit.recordings.clients.base import (
    FILLS_REQUESTS,
    STEPPED,
    WALL,
    ClientRequest,
    declare_client,
    finder,
    refuse,
)
from tracefit.recordings.requests import from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.recordings.requests import Parts

_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Profiled(msgspec.Struct):
    timestamp: _Nanoseconds
    response_timestamps: list[_Nanoseconds] = []
    response_outputs: list[dict[str, Any]] = []
    request_inputs: dict[str, Any] = {}


class _Profile(msgspec.Struct):
    requests: list[msgspec.Raw]


class _Profiles(msgspec.Struct):
    experiments: list[msgspec.Raw]


def _parts(payload: bytes) -> Parts[ClientRequest]:
    for number, text in enumerate(from_json(payload, _Profiles).experiments):
        try:
            requests = msgspec.json.decode(text, type=_Profile).requests
        except UNREADABLE_RECORD as error:
            yield 0, bytes(text), partial(refuse, error)
            continue
        yield from ((0, bytes(request), partial(_profiled, benchmark=number)) for request in requests)


def _profiled(record: bytes, *, benchmark: int) -> ClientRequest:
    decoded = from_json(record, _Profiled)
    times, outputs = decoded.response_timestamps, decoded.response_outputs
    if len(times) != len(outputs):
        raise msgspec.ValidationError("responses and their times differ in number")
    read = [_response(output) for output in outputs]
    usage: dict[str, Any] = next((used for used, _ in reversed(read) if used), {})
    spoken = [(time - decoded.timestamp) / 1e9 for time, (_, tokens) in zip(times, read, strict=True) if tokens]
    sent = decoded.request_inputs.get("input_ids")
    prompt = _count(usage.get("prompt_tokens")) or (len(sent) if isinstance(sent, list) else None)
    counted = _count(usage.get("completion_tokens")) or sum(tokens for _, tokens in read)
    # One part is the whole answer if the request is not streamed: it shows no first token.
    is_streamed = len(spoken) > 1 or counted == 1
    return ClientRequest(
        start_s=decoded.timestamp / 1e9,
        benchmark=benchmark,
        token_s=spoken if is_streamed else None,
        first_s=spoken[0] if spoken and is_streamed else None,
        last_s=spoken[-1] if spoken else None,
        prompt_tokens=prompt,
        output_tokens=counted if spoken else None,
        error=not spoken,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 2**31 else None


def _response(output: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the `usage` that a response states, and its tokens: 1 for a part with a text, the number of its ids, or
    0.
    """
    ids = output.get("output_ids")
    if ids is not None:
        return {}, len(ids) if isinstance(ids, list) else 1
    text = output.get("response")
    if not isinstance(text, str):
        return {}, int(bool(output.get("text_output")))
    used: dict[str, Any] = {}
    has_text = False
    for event in _events(text):
        if isinstance(event.get("usage"), dict):
            used = event["usage"]
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            has_text |= isinstance(choice, dict) and _says(choice)
        has_text |= bool(event.get("text_output") or event.get("generated_text"))
    return used, int(has_text)


def _events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a response: server-sent events, or one object."""
    for line in text.split("\n"):
        data = line.strip().removeprefix("data:").strip()
        if data.startswith("{"):
            with suppress(ValueError, RecursionError):
                event = json.loads(data)
                if isinstance(event, dict):
                    yield event


def _says(choice: dict[str, Any]) -> bool:
    held = [choice, *(choice[name] for name in ("delta", "message") if isinstance(choice.get(name), dict))]
    return any(each.get(name) for each in held for name in ("text", "content", "reasoning_content", "reasoning"))


FORMAT = declare_client(
    Recording(
        "genai_perf",
        "genai-perf's profile",
        finder("document", rb'"experiments"\s*:\s*\[', rb'"response_timestamps"\s*:'),
        fills=f"{FILLS_REQUESTS}{STEPPED}, where the server states lengths",
        units="ns",
        clock=WALL,
        versions="genai-perf 0.0.8 to 0.0.16 (Triton's Performance Analyzer)",
    ),
    _parts,
)
