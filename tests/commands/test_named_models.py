"""Models that spans name: servers of different models in one run are said, adapters and aliases of one model are
not."""

from __future__ import annotations

import json

import pytest

from tracefit import ServerOptions, ingest, inspect

BEGIN_NS = 1_700_000_000_000_000_000
RESPONSE, REQUEST = "gen_ai.response.model", "gen_ai.request.model"
LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct"


def server(models, service="vllm", scope="vllm.llm_engine", **resource):
    """Return the spans of one server, a request for each name of a model, as a line of OTLP."""
    facts = {"service.name": service} | {key.replace("_", "."): value for key, value in resource.items()}
    counts = {"gen_ai.usage.prompt_tokens": 100, "gen_ai.usage.completion_tokens": 20}
    times = {"gen_ai.latency.time_to_first_token": 0.05, "gen_ai.latency.e2e": 0.45}
    spans = []
    for n, (key, model) in enumerate(models):
        names = {"gen_ai.request.id": f"{service}-{n}"} | ({key: model} if model else {})
        spans.append(
            {
                "traceId": f"{hash_of(service, resource):016x}{n + 1:016x}",
                "spanId": f"{n + 1:016x}",
                "name": "llm_request",
                "startTimeUnixNano": str(BEGIN_NS + n * 10**9),
                "endTimeUnixNano": str(BEGIN_NS + n * 10**9 + 450_000_000),
                "attributes": attributes(names | counts | times),
            }
        )
    scoped = {"scope": {"name": scope}, "spans": spans}
    return {"resource": {"attributes": attributes(facts)}, "scopeSpans": [scoped]}


def hash_of(*parts):
    return sum(map(ord, json.dumps(parts))) * 7919


def attributes(values):
    """Write attributes as OTLP."""
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [{"key": k, "value": {kinds[type(v)]: v}} for k, v in values.items()]


@pytest.fixture
def said(tmp_path):
    """Ingest one run of some servers; return what is said of their models, and the exit code."""

    def read(*servers, settings=None, config=None):
        run = tmp_path / "run"
        run.mkdir()
        (run / "traces.json").write_text(json.dumps({"resourceSpans": servers}) + "\n")
        if config:
            (run / "config.json").write_text(json.dumps(config))
        result = ingest(run, tmp_path / "tables", server=ServerOptions(settings=settings or {}), workers=1)
        (inspected,) = inspect(tmp_path / "tables").runs
        named = [text.removeprefix("run: ") for text in result.warnings if " name" in text]
        assert list(inspected.models) == named
        return named, result.exit_code

    return read


def of(model, count=3, key=RESPONSE):
    return [(key, model)] * count


@pytest.mark.slow
def test_two_services_of_different_models(said):
    (text,), code = said(server(of(LLAMA), "chat"), server(of(QWEN, 2), "code"))
    assert text == (
        f"servers of different models are in one run (chat names {LLAMA}, 3 spans; code names {QWEN}, 2 spans), and "
        "are read as one deployment: give the spans of each a run folder of its own"
    )
    assert code == 3


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("scope", ["vllm.llm_engine", "vllm.tracing.otel", "sglang server"])
def test_the_requested_model_counts_where_no_answer_names_one(said, scope):
    if scope == "sglang server":
        servers = [server(of(model, key=REQUEST), name, scope=scope) for model, name in ((LLAMA, "a"), (QWEN, "b"))]
        for each in servers:
            for span in each["scopeSpans"][0]["spans"]:
                span["attributes"] += attributes({"rid": span["spanId"]})
    else:
        servers = [
            server(of(LLAMA, key=REQUEST), "a", scope=scope),
            server(of(QWEN, key=REQUEST), "b", scope=scope),
        ]
    (text,), code = said(*servers)
    assert f"a names {LLAMA}, 3 spans; b names {QWEN}, 3 spans" in text
    assert code == 3


@pytest.mark.slow
def test_instances_of_one_service_are_named_apart(said):
    first, second = (server(of(model), service_instance_id=pod) for model, pod in ((LLAMA, "pod-0"), (QWEN, "pod-1")))
    (text,), _ = said(first, second)
    assert f"vllm (pod-0) names {LLAMA}, 3 spans; vllm (pod-1) names {QWEN}, 3 spans" in text


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    "servers",
    [
        [server(of(LLAMA), "a"), server(of(LLAMA), "b")],
        [server(of(LLAMA), "a"), server(of("/models/Llama-3.1-8B-Instruct/"), "b")],
        [
            server(of(LLAMA), "a"),
            server(of("/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f2"), "b"),
        ],
        [server(of(LLAMA), "a"), server(of(None), "b")],
        [server(of(LLAMA) + of("sql-adapter"), "a"), server(of(LLAMA) + of("chat-adapter"), "b")],
    ],
    ids=["replicas", "a path", "a cache", "unnamed", "adapters"],
)
def test_servers_of_one_model(said, servers):
    assert said(*servers, settings={"model": LLAMA}) == ([], 0)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    "settings",
    [
        {"model": LLAMA},
        {"enable_lora": True},
        {"lora_modules": "sql=/adapters/sql"},
        {"model": "/models/base", "served_model_name": f"{LLAMA} sql"},
    ],
)
def test_a_server_with_adapters_has_several_names(said, settings):
    assert said(server(of(LLAMA) + of("sql")), settings=settings) == ([], 0)


@pytest.mark.slow
def test_servers_of_adapters_only(said):
    assert said(server(of("sql"), "a"), server(of("chat"), "b"), settings={"enable_lora": True}) == ([], 0)


@pytest.mark.slow
def test_names_that_nothing_explains(said):
    (text,), code = said(server(of(LLAMA) + of(QWEN, 2)))
    assert text.startswith(
        f"spans of vllm name several models ({LLAMA}, 3 spans and {QWEN}, 2 spans): if they are of several"
    )
    assert code == 0


@pytest.mark.slow
def test_names_that_are_not_of_the_stated_model(said):
    (text,), _ = said(server(of("a") + of("b")), settings={"model": LLAMA})
    assert f", and none is {LLAMA}: " in text


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    ("name", "model", "is_said"),
    [
        (LLAMA, QWEN, True),
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf", True),
        (LLAMA, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", False),
        (LLAMA, "codellama/CodeLlama-7b-hf", True),
        (LLAMA, "my-assistant", False),
        (None, QWEN, False),
    ],
)
def test_a_configuration_of_another_model(said, name, model, is_said):
    texts, code = said(server(of(model)), config=CONFIG | ({"_name_or_path": name} if name else {}))
    wanted = (
        f"spans name {model}, 3 spans, and config.json is of {name}: features of the model are those of config.json"
    )
    assert texts == ([wanted] if is_said else [])
    assert code == 0
