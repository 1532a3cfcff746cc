"""Server settings: values and their sources; run descriptions, command lines and the server's log."""

from __future__ import annotations

import json
import re
from textwrap import dedent

import pytest

from tracefit.errors import UsageError
from tracefit.server.settings import (
    ALIASES,
    SETTING_NAMES,
    ServerSettings,
    assume_defaults,
    canonical_name,
    context_remedy,
    merge,
    parse_serve_command,
    parse_settings,
    read_all_settings,
    read_settings,
    settings_from,
    settings_from_json,
)


def test_empty_settings_have_no_values():
    settings = ServerSettings()

    assert settings.values() == settings.knobs() == {}
    assert settings == settings_from({}, where="x")


@pytest.mark.parametrize(
    "spelling",
    [
        "tensor_parallelism",
        "tensor_parallel_size",
        "--tensor-parallel-size",
        "tp",
        "-tp",
        "TP",
        "tensor-parallel",
    ],
)
def test_spellings_of_a_setting(spelling):
    assert settings_from({spelling: 4}, where="x").tensor_parallel == 4


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_of_a_setting(alias):
    assert canonical_name(alias) in SETTING_NAMES


def test_values_have_sources_and_unknown_ones_are_kept():
    settings = settings_from(
        {
            "max_num_seqs": 64,
            "note": "hot day",
            "load_seconds": 9.5,
            "lora": ["a", {"b": 1}],
            "nothing": None,
            "gpu": None,
        },
        where="run.yaml",
        source="read",
    )

    assert settings.sources == {"max_num_seqs": "read"}, "null is unset"
    assert settings.other == {"note": "hot day", "load_seconds": 9.5, "lora": json.dumps(["a", {"b": 1}])}


def test_agreeing_spellings_merge_and_others_are_refused():
    assert settings_from({"tp": 2, "tensor_parallelism": 2}, where="x").tensor_parallel == 2
    with pytest.raises(UsageError, match=r"run\.yaml: tp 2 and tensor_parallel_size 4 contradict"):
        settings_from({"tp": 2, "tensor_parallel_size": 4}, where="run.yaml")


@pytest.mark.parametrize(
    "key",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "tensor_parallelism",
        "block_size",
        "num_gpu_blocks_override",
    ],
)
@pytest.mark.parametrize("value", [0, -1, "64", 1.5, True, float("nan"), float("inf"), 10**30, [64], ""])
def test_count_that_cannot_be_names_key_and_file(key, value):
    with pytest.raises(UsageError, match=rf"^run\.yaml: {key} must be (a whole number|greater|less)") as caught:
        settings_from({key: value}, where="run.yaml")

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("gpu_memory_utilization", [0.9, 1, 0.01], [0, -0.1, 1.01, "0.9", float("nan"), True]),
        ("step_tracing_sample_rate", [0, 0.1, 1.0], [-0.1, 1.5, "all", float("inf")]),
        ("enforce_eager", [True, False], [0, 1, "true", "no"]),
        ("enable_prefix_caching", [True, False], ["yes", 1.0]),
        ("model", ["org/name"], ["", "  ", 7, "x" * 600, "a\nb", ["m"]]),
        ("dtype", ["bfloat16"], [16, False]),
    ],
)
def test_kinds_of_values(key, good, bad):
    for value in good:
        assert settings_from({key: value}, where="x").values() == {key: value}
    for value in bad:
        with pytest.raises(UsageError, match=f"^x: {key} must "):
            settings_from({key: value}, where="x")


def test_a_users_value_wins_and_keeps_its_source():
    read = settings_from({"max_num_seqs": 64, "tp": 2, "note": "a", "other": 1}, where="run.yaml", source="read")
    given = settings_from({"max_num_seqs": 128, "note": "b"}, where="options")
    merged = merge(read, given)

    assert (merged.max_num_seqs, merged.tensor_parallel) == (128, 2)
    assert merged.sources == {"tensor_parallel": "read", "max_num_seqs": "given"}
    assert merged.other == {"note": "b", "other": 1}


def test_merging_empty_settings_changes_nothing():
    settings = settings_from({"max_num_seqs": 64, "note": "a"}, where="x", source="read")

    assert merge(settings, ServerSettings()) == merge(ServerSettings(), settings) == settings


def test_defaults_fill_in_missing_settings():
    settings = assume_defaults(settings_from({"block_size": 32}, where="x", source="read"))

    assert settings.values() == {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "gpu_memory_utilization": 0.9,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "block_size": 32,
        "kv_cache_dtype": "auto",
    }, "of the engine; others depend on version and hardware"
    assert {n for n, source in settings.sources.items() if source != "assumed"} == {"block_size"}


def test_ranks_are_fewer_than_tokens():
    assert settings_from({"max_model_len": 1_000_000, "tp": 65_536}, where="x").tensor_parallel == 65_536
    with pytest.raises(UsageError, match="tp must be less than or equal to 65536, not 1000000"):
        settings_from({"tp": 1_000_000}, where="x")


def test_values_and_sources_have_one_order():
    there = settings_from({"max_num_seqs": 64, "tp": 2, "model": "m", "dtype": "half"}, where="x")
    back = settings_from({"dtype": "half", "model": "m", "tp": 2, "max_num_seqs": 64}, where="x")

    assert list(there.values()) == list(back.values()) == ["model", "tensor_parallel", "max_num_seqs", "dtype"]
    assert list(there.sources) == list(back.sources)
    assert json.dumps(there.knobs()) == json.dumps(back.knobs())


def test_deployment_id_leaves_out_settings_of_the_view():
    settings = settings_from(
        {
            "model": "m",
            "gpu": "H100",
            "tp": 2,
            "pp": 2,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "kv_cache_dtype": "fp8",
            "journey_tracing_sample_rate": 0.5,
            "step_tracing_sample_rate": 0.5,
            "step_tracing_rich_subsample_rate": 0.5,
            "note": "n",
        },
        where="x",
    )

    assert settings.knobs() == {
        "pipeline_parallel": 2,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
    }


# -- run descriptions -----------------------------------------------------------------------------------

RUN = """
# a run
model: org/tiny-7b
model_config: config.json
tensor_parallelism: 2
pipeline_parallelism: 1
max_model_len: 2048
max_num_batched_tokens: 2048
max_num_seqs: 64
block_size: 16
dtype: bfloat16
enforce_eager: true
enable_prefix_caching: true
enable_chunked_prefill: true
async_scheduling: false
num_gpu_blocks_override: null
journey_tracing_sample_rate: 1.0
otel_span_event_count_limit: default (128)
vllm_version: "0.15.1"
gpu: H100
"""


def test_run_description():
    settings = parse_settings(RUN, where="exp-config.yaml")

    assert settings.values() == {
        "model": "org/tiny-7b",
        "gpu": "H100",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "block_size": 16,
        "dtype": "bfloat16",
        "async_scheduling": False,
        "journey_tracing_sample_rate": 1.0,
    }
    assert set(settings.sources.values()) == {"read"}
    assert settings.other == {
        "model_config": "config.json",
        "otel_span_event_count_limit": "default (128)",
        "vllm_version": "0.15.1",
    }


def test_options_as_vllm_spells_them():
    text = "tensor-parallel-size: 4\nmax-num-seqs: 32\ngpu-memory-utilization: 0.85\nhf-overrides: {a: [1]}\n"
    settings = parse_settings(text, where="x")

    assert settings.values() == {"tensor_parallel": 4, "max_num_seqs": 32, "gpu_memory_utilization": 0.85}
    assert settings.other == {"hf_overrides": '{"a": [1]}'}


@pytest.mark.parametrize(
    "text",
    [
        "vllm:\n  max_num_seqs: 64\n  tensor_parallel_size: 2\n",
        "server:\n  vllm:\n    max-num-seqs: 64\n    tp: 2\n",
        "tp: 2\nvllm: {args: {max_num_seqs: 64}}\n",
        "args: [--max-num-seqs, 64, -tp, '2']\n",
        "args: --max-num-seqs=64 -tp 2\n",
        "engine_args: {max_num_seqs: 64}\ntp: 2\n",
        '{"schema_version": 1, "engine_kwargs": {"max_num_seqs": 64, "tensor_parallel_size": 2}}',
        "max_num_seqs: 64\nvllm: {max_num_seqs: 64, tp: 2}\n",
    ],
)
def test_settings_may_be_grouped(text):
    assert parse_settings(text, where="x").values() == {"tensor_parallel": 2, "max_num_seqs": 64}


def test_cache_and_gpu_are_read_from_nested_sections():
    text = (
        '{"kv_cache": {"num_gpu_blocks": 2588, "num_cpu_blocks": null}, "hardware": {"device_name": "NVIDIA '
        'GeForce RTX 4090"}}'
    )
    assert parse_settings(text, where="x").values() == {
        "num_gpu_blocks": 2588,
        "gpu": "NVIDIA GeForce RTX 4090",
    }


def test_nested_values_lose_only_keys_that_json_lacks():
    assert parse_settings("x: {2020-01-01: 1, a: 2020-01-01}\n", where="x").other == {"x": '{"a": "2020-01-01"}'}


MANIFESTS = {
    "kserve": (
        """
        kind: InferenceService
        metadata: {name: m}
        spec:
          predictor:
            model:
              modelFormat: {name: vLLM}
              args: [--model_name=chat, --model_id=org/a-model, --max-num-seqs=2, --tensor-parallel-size=2]
        """,
        {"model": "org/a-model", "max_num_seqs": 2, "tensor_parallel": 2},
    ),
    "a script in a pod beside another container": (
        """
        spec:
          containers:
          - image: example.org/vllm:1
            command: [/bin/sh, -c]
            args:
            - |
              set -e
              exec vllm serve org/a-model \\
                --tensor-parallel-size 2 --max-num-batched-tokens 8k
              echo done
          - image: otel/collector
            args: ["--config=/etc/otel.yaml", --model, none]
        """,
        {"model": "org/a-model", "tensor_parallel": 2, "max_num_batched_tokens": 8000},
    ),
    "a compose file with a list": (
        """
        services:
          vllm:
            image: vllm/vllm-openai:v0.19.0
            command: ["org/a-model", "--kv-cache-dtype", "fp8"]
          proxy: {image: nginx, command: "nginx -g 'daemon off"}
        """,
        {"model": "org/a-model", "kv_cache_dtype": "fp8"},
    ),
    "a compose file with a block": (
        """
        services:
          vllm:
            image: vllm/vllm-openai
            command: |
              --model org/a-model
              --max-model-len 8K
        """,
        {"model": "org/a-model", "max_model_len": 8192},
    ),
    "the module in a line": (
        "services: {a: {command: python3 -m vllm.entrypoints.openai.api_server --max-num-seqs 3}}",
        {"max_num_seqs": 3},
    ),
    "values of a chart": (
        """
        engine:
          modelSpec:
          - name: small
            repository: vllm/vllm-openai
            modelURL: org/a-model
            vllmConfig: {tensorParallelSize: "2", enableChunkedPrefill: false, dtype: bfloat16,
                         extraArgs: ["--gpu-memory-utilization", "0.85"]}
        """,
        {
            "model": "org/a-model",
            "tensor_parallel": 2,
            "enable_chunked_prefill": False,
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.85,
        },
    ),
    "Ray Serve": (
        """
        applications:
        - args:
            llm_configs:
            - model_loading_config: {model_id: a-model, model_source: org/a-model}
              accelerator_type: A10G
              engine_kwargs: {max_model_len: 8192}
        """,
        {"model": "a-model", "gpu": "A10G", "max_model_len": 8192},
    ),
    "a deployment with variables and a node's label": (
        """
        kind: Deployment
        spec:
          template:
            spec:
              nodeSelector: {cloud.google.com/gke-accelerator: nvidia-h100-80gb}
              containers:
              - image: vllm/vllm-openai:v0.19.0
                command: [vllm, serve, org/a-model]
                args: [--tensor-parallel-size, $(TP), --max-num-seqs=64, --no-enable-prefix-caching]
                env: [{name: TP, value: "4"}, {name: TOKEN, valueFrom: {secretKeyRef: {name: t, key: k}}}]
        """,
        {
            "model": "org/a-model",
            "gpu": "nvidia-h100-80gb",
            "tensor_parallel": 4,
            "max_num_seqs": 64,
            "enable_prefix_caching": False,
        },
    ),
    "leader and workers": (
        """
        kind: LeaderWorkerSet
        spec:
          leaderWorkerTemplate:
            leaderTemplate:
              spec:
                containers:
                - image: vllm/vllm-openai:v0.19.0
                  command:
                  - sh
                  - -c
                  - "bash serve.sh leader --size=$(LWS_GROUP_SIZE); python3 -m vllm.entrypoints.openai.api_server
                    --model org/a-model --tensor-parallel-size 8 --pipeline_parallel_size 2"
            workerTemplate:
              spec: {containers: [{image: "vllm/vllm-openai:v0.19.0", command: [sh, -c, bash serve.sh worker]}]}
        """,
        {"model": "org/a-model", "tensor_parallel": 8, "pipeline_parallel": 2},
    ),
    "values of llm-d": (
        """
        modelArtifacts: {uri: "hf://org/a-model", name: org/a-model}
        decode:
          parallelism: {tensor: 4}
          containers:
          - {image: ghcr.io/llm-d/llm-d:v0.2, modelCommand: vllmServe, args: [--max-num-seqs, "128", --block-size=64]}
        """,
        {"model": "org/a-model", "tensor_parallel": 4, "max_num_seqs": 128, "block_size": 64},
    ),
    "SGLang in a pod": (
        """
        spec:
          containers:
          - image: lmsysorg/sglang
            command: [python3, -m, sglang.launch_server]
            args: [--model-path, org/a-model, --tp-size, "2", --context-length, "4096"]
        """,
        {"model": "org/a-model", "tensor_parallel": 2, "max_model_len": 4096},
    ),
    "an engine's configuration with a line of arguments": (
        """
        inference:
          engineConfig: {model: org/a-model, tensorParallelSize: 2, extraArgs: "--max-num-seqs 16 --max-model-len 4k"}
        """,
        {"model": "org/a-model", "tensor_parallel": 2, "max_num_seqs": 16, "max_model_len": 4000},
    ),
    "groups in groups": ("{vllm: " * 8 + "{tp: 2}" + "}" * 8, {"tensor_parallel": 2}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_settings_of_a_manifest_are_the_arguments_of_vllm(name):
    text, values = MANIFESTS[name]
    settings = parse_settings(dedent(text), where="x")
    assert settings.values() == {key: values[key] for key in SETTING_NAMES if key in values}
    assert not settings.unread


def test_the_environment_of_a_compose_file_is_not_known():
    text = """
    services:
      vllm:
        image: vllm/vllm-openai
        command: >
          --model org/a-model --tensor-parallel-size ${TP:-2}
          --max-num-seqs 32
    """
    settings = parse_settings(dedent(text), where="compose.yaml")

    assert settings.values() == {"model": "org/a-model", "max_num_seqs": 32}
    assert settings.unread == ("compose.yaml: tensor_parallel is ${TP:-2}, whose value the file does not state",)


SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: m}\nspec: {ports: [{port: 8000}]}\n"
SERVER = (
    "kind: Deployment\nspec: {template: {spec: {containers: [{image: vllm/vllm-openai, "
    'args: [--model, org/a-model, --max-num-seqs=%s, "--port=8000"]}]}}}\n'
)
KUBECTL = """
apiVersion: v1
items:
- apiVersion: v1
  kind: Service
  spec: {ports: [{port: 8000}]}
- apiVersion: apps/v1
  kind: Deployment
  metadata: {annotations: {deployment.kubernetes.io/revision: "1"}, managedFields: [{f:args: {}}]}
  spec: {template: {spec: {containers: [{command: [vllm, serve, org/a-model], args: [--max-num-seqs, "8"]}]}}}
  status: {replicas: 1}
kind: List
metadata: {resourceVersion: ""}
"""


@pytest.mark.parametrize(
    "text",
    [
        f"{SERVER % 8}---\n{SERVICE}",
        f"---\n# Source: m/templates/service.yaml\n{SERVICE}---\n---\n# Source: m\n{SERVER % 8}---\n",
        f"{SERVER % 8}---\n{SERVER % 8}",
        "model: org/a-model\nmax_num_seqs: 8\n---\n",
        f"{SERVICE}---\nmodel: org/a-model\nmax_num_seqs: 8\n",
        KUBECTL,
        f"{SERVICE}---{KUBECTL}",
    ],
)
def test_of_several_documents_those_that_start_the_server_count(text):
    settings = parse_settings(text, where="x")
    assert settings.values() == {"model": "org/a-model", "max_num_seqs": 8}
    assert not settings.unread


# -- servers for prefill and for decode ------------------------------------------------------------------

OF_LLM_D = """
modelArtifacts: {uri: "hf://org/a-model", name: org/a-model}
routing: {servicePort: 8000}
decode:
  replicas: 1
  parallelism: {tensor: 4}
  containers:
  - {name: vllm, image: ghcr.io/llm-d/llm-d:v0.2, args: [--max-model-len, "32000", --max-num-seqs=128]}
prefill:
  replicas: 2
  parallelism: {tensor: 1}
  containers:
  - {name: vllm, image: ghcr.io/llm-d/llm-d:v0.2, args: [--max-model-len, "32000", --block-size=64]}
"""
OF_DYNAMO = """
kind: DynamoGraphDeployment
spec:
  services:
    Frontend: {replicas: 1}
    VllmDecodeWorker:
      extraPodSpec:
        mainContainer: {command: [python3, -m, dynamo.vllm], args: [--model, org/a-model, --max-num-seqs, "128", -tp, "4", --max-model-len, "32000"]}
    VllmPrefillWorker:
      extraPodSpec:
        mainContainer: {command: [python3, -m, dynamo.vllm], args: [--model, org/a-model, --block-size, "64", -tp, "1", --max-model-len, "32000"]}
"""
OF_KSERVE = """
kind: LLMInferenceService
spec:
  model: {uri: "hf://org/a-model", name: org/a-model}
  template:
    containers:
    - {name: main, args: [--model, org/a-model, --max-num-seqs=128, --tensor-parallel-size=4, --max-model-len=32000]}
  prefill:
    template:
      containers:
      - {name: main, args: [--model, org/a-model, --block-size=64, --tensor-parallel-size=1, --max-model-len=32000]}
"""
DECODE = {"model": "org/a-model", "tensor_parallel": 4, "max_model_len": 32000, "max_num_seqs": 128}
PREFILL = {"model": "org/a-model", "tensor_parallel": 1, "max_model_len": 32000, "block_size": 64}


@pytest.mark.parametrize("text", [OF_LLM_D, OF_DYNAMO, OF_KSERVE], ids=["llm-d", "dynamo", "kserve"])
@pytest.mark.parametrize(
    ("where", "values"),
    [
        ("runs/decode-0/values.yaml", DECODE),
        ("runs/my-prefill/values.yaml", PREFILL),
        ("runs/prefill-and-decode/values-decode.yaml", DECODE),
    ],
)
def test_the_name_of_a_run_says_which_of_two_kinds_of_servers_it_is_of(text, where, values):
    settings = parse_settings(text, where=where)

    assert settings.values() == values
    assert not settings.unread


@pytest.mark.parametrize("text", [OF_LLM_D, OF_DYNAMO, OF_KSERVE], ids=["llm-d", "dynamo", "kserve"])
@pytest.mark.parametrize("where", ["values.yaml", "decode/prefill-decode/values.yaml"])
def test_only_what_servers_for_prefill_and_decode_share_is_taken(text, where):
    settings = parse_settings(text, where=where)

    assert settings.values() == {"model": "org/a-model", "max_model_len": 32000}
    differing = "tensor_parallel 1 and 4, max_num_seqs none and 128, block_size 64 and none"
    assert len(settings.unread) == 1
    assert settings.unread[0].startswith(f"{where}: its servers for prefill and for decode differ ({differing})")
    assert (
        "state them with `ServerOptions.settings`, or put prefill or decode into the name of the run's folder"
        in settings.unread[0]
    )


@pytest.mark.parametrize("off", ["create: false", "replicas: 0", "enabled: false"])
def test_a_section_whose_servers_are_not_started_is_not_read(off):
    settings = parse_settings(OF_LLM_D.replace("replicas: 2", off), where="values.yaml")

    assert settings.values() == DECODE
    assert not settings.unread


def test_equal_servers_for_prefill_and_decode_are_read_as_one():
    section = "{args: [--model=org/a-model, --max-num-seqs=8]}"
    settings = parse_settings(f"{{prefill: {section}, decode: {section}}}", where="x")

    assert settings.values() == {"model": "org/a-model", "max_num_seqs": 8}
    assert not settings.unread


@pytest.mark.parametrize(
    "text", [f"{SERVER % 2}---\n{SERVICE}---\n{SERVER % 4}", f"max_num_seqs: 2\n---\n{SERVER % 4}"]
)
def test_documents_that_contradict_are_refused(text):
    with pytest.raises(UsageError, match=r"x: max_num_seqs 2 and (--)?max.num.seqs 4 contradict"):
        parse_settings(text, where="x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{SERVICE}---\n{SERVICE}", "x: holds several YAML documents, and no arguments of vLLM in any"),
        (f"{SERVER % 2}---\n- a\n", "x: holds a list where a mapping was expected"),
        (f"{SERVER % 2}---\na: &b 1\nc: *b\n", "x: uses YAML aliases"),
        (f"{SERVER % 2}---\na: 1\na: 2\n", "x: is not YAML at line 5"),
    ],
)
def test_each_document_is_checked(text, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_settings(text, where="x")


def test_servers_of_one_role_that_contradict_are_refused():
    two = "{decode: [{args: [--max-num-seqs=2]}, {args: [--max-num-seqs=4]}], prefill: {args: [--max-num-seqs=2]}}"
    with pytest.raises(UsageError, match="max_num_seqs 2 and max_num_seqs 4 contradict"):
        parse_settings(two, where="x")


def test_servers_of_a_manifest_that_contradict_are_refused():
    two = "{a: {args: [--max-num-seqs=2]}, b: {args: [--max-num-seqs=4]}}"
    with pytest.raises(UsageError, match="max_num_seqs 2 and max_num_seqs 4 contradict"):
        parse_settings(two, where="x")


def test_a_run_description_may_hold_commands_of_other_programs():
    text = "max_num_seqs: 8\nload: {command: [bench, --max-num-seqs, 64]}\n"
    assert parse_settings(text, where="x").max_num_seqs == 8


CONFIGURATION = """
max-model-len: "8k"
tensor_parallel_size: "2"
max-num-seqs: '256'
gpu-memory-utilization: "0.85"
enable-prefix-caching: "false"
enforce-eager: true
no-enable-chunked-prefill: true
dtype: "bfloat16"
"""


def test_a_configuration_file_of_vllm_is_read_as_its_options():
    assert parse_settings(CONFIGURATION, where="x").values() == {
        "tensor_parallel": 2,
        "max_model_len": 8000,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.85,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "dtype": "bfloat16",
    }


UNRESOLVED = {
    "a script": (
        "TP=$(nvidia-smi -L | wc -l)\nvllm serve org/m -tp $TP --max-num-seqs ${SEQS:-8}\n",
        {"model": "org/m"},
    ),
    "an output": (
        "vllm serve org/m -tp $(nvidia-smi -L | wc -l) --max-num-seqs `nproc` --block-size 16\n",
        {"model": "org/m", "block_size": 16},
    ),
    "two values": ("TP=2\nTP=4\nvllm serve org/m -tp $TP --max-num-seqs $SEQS\n", {"model": "org/m"}),
    "one command's": ("TP=2 echo\nvllm serve org/m -tp $TP --max-num-seqs $SEQS\n", {"model": "org/m"}),
}


@pytest.mark.parametrize("name", UNRESOLVED)
def test_a_variable_without_a_literal_value_is_unknown_and_said(name):
    script, values = UNRESOLVED[name]
    settings = parse_serve_command(script, where="serve.sh")

    assert settings.values() == values
    assert [text.split(" is ")[0] for text in settings.unread] == [
        "serve.sh: tensor_parallel",
        "serve.sh: max_num_seqs",
    ]


def test_variables_that_a_script_assigns_are_put_in():
    script = """#!/bin/bash
    #SBATCH --gres=gpu:h100:4
    MODEL=org/m
    export LEN="16k"  # tokens
    readonly MORE='--max-num-seqs 8 --enforce-eager'
    srun vllm serve $MODEL --tensor-parallel-size 4 \\
        --max-model-len "${LEN}" $MORE; echo done
    """
    settings = parse_serve_command(script, where="run.slurm")

    assert settings.values() == {
        "model": "org/m",
        "tensor_parallel": 4,
        "max_model_len": 16_000,
        "max_num_seqs": 8,
        "enforce_eager": True,
    }
    assert not settings.unread


def test_files_may_leave_one_setting_to_other_variables(tmp_path):
    (tmp_path / "a.sh").write_text("vllm serve org/m -tp $TP")
    (tmp_path / "b.sh").write_text("vllm serve org/m -tp $RANKS")

    assert read_all_settings([tmp_path / "a.sh", tmp_path / "b.sh"]).values() == {"model": "org/m"}


def test_sglang_s_options_are_read_under_vllm_s_names():
    command = (
        "python3 -m sglang.launch_server --model-path org/m --tp 4 --context-length 8192 --max-running-requests 64 "
        "--mem-fraction-static 0.8 --disable-radix-cache --page-size 16"
    )
    settings = parse_serve_command(command, where="x")

    assert settings.values() == {
        "model": "org/m",
        "tensor_parallel": 4,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "block_size": 16,
    }
    assert settings.is_sglang
    assert settings.other["mem_fraction_static"] == 0.8


def test_counts_of_a_configuration_file_have_the_units_of_options():
    settings = parse_settings("max-num-batched-tokens: 8k\nmax-model-len: 4K\n", where="x")
    assert settings.values() == {"max_model_len": 4096, "max_num_batched_tokens": 8000}


@pytest.mark.parametrize("text", ["kind: Service\nspec: {ports: [8000]}\n", '{"kind": 1, "spec": 2}'])
def test_a_file_without_any_setting_says_what_it_has(text):
    (said,) = parse_settings(text, where="x.yaml").unread
    assert said == "x.yaml: read 2 keys, none of them a setting; keys seen: kind, spec"


def test_an_empty_file_and_one_with_a_setting_say_nothing():
    assert parse_settings("", where="x").unread == parse_settings("note: 1\ntp: 2\n", where="x").unread == ()


def test_group_name_with_plain_text_is_just_kept():
    assert parse_settings("server: rack 7\n", where="x").other == {"server": "rack 7"}


def test_contradicting_statements_are_refused():
    with pytest.raises(UsageError, match=r"x: max_num_seqs 64 and max_num_seqs 32 contradict"):
        parse_settings("max_num_seqs: 64\nvllm: {max_num_seqs: 32}\n", where="x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_num_seqs: 0", "max_num_seqs must be greater than or equal to 1, not 0"),
        ("max_num_seqs: -4", "max_num_seqs must be greater than or equal to 1, not -4"),
        ("max_num_seqs: many", "max_num_seqs must be a whole number"),
        ("max_num_seqs: [64]", "max_num_seqs must be a single value, not a list"),
        ("model: {a: 1}", "model must be a single value, not an object"),
        ("enforce_eager: 1", "enforce_eager must be true or false"),
    ],
)
def test_wrong_value_names_key_and_file(line, message):
    with pytest.raises(UsageError, match=rf"run\.yaml: {message}"):
        parse_settings(line, where="run.yaml")


BOMB = "a: &a [x, x]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "uses YAML aliases"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "uses YAML aliases"),
        ("- a\n- b\n", "holds a list where a mapping was expected"),
        ("just text", "holds text"),
        ("a: [1, 2", "is not YAML"),
        ("a: b: c", "is not YAML at line 1"),
        ("a: !!python/object/apply:os.system [true]", "uses the YAML tag"),
        ("a: 2020-13-45", "is not YAML"),
        ("a: 1\n---\na: 2\n", "holds several YAML documents"),
        ("[" * 500 + "]" * 500, "is nested too deeply"),
        ("a: " + "9" * 5000, "is not YAML"),
        ("? [1, 2]\n: 3\n", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_file_that_is_no_run_description_is_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_settings(text, where="run.yaml")

    assert str(caught.value).startswith("run.yaml: ")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UsageError, match=r"run\.yaml: is not UTF-8 text \(byte 3\)"):
        parse_settings(b"a: \xff", where="run.yaml")


def test_an_empty_file_has_no_settings():
    assert parse_settings("# nothing\n", where="x").values() == {}


# -- command lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "values"),
    [
        ("vllm serve org/m", {"model": "org/m"}),
        ("vllm serve --model org/m -tp 2", {"model": "org/m", "tensor_parallel": 2}),
        ("vllm serve --max-num-seqs 64 org/m", {"model": "org/m", "max_num_seqs": 64}),
        ("vllm serve m --max-num-seqs=64 --dtype=half", {"model": "m", "max_num_seqs": 64, "dtype": "half"}),
        ("/opt/venv/bin/vllm serve m --max_model_len 4096", {"model": "m", "max_model_len": 4096}),
        ("vllm serve m --max-model-len 16k", {"model": "m", "max_model_len": 16_000}),
        ("vllm serve m --max-model-len 16K", {"model": "m", "max_model_len": 16_384}),
        ("vllm serve m --max-num-batched-tokens 1.5k", {"model": "m", "max_num_batched_tokens": 1500}),
        (
            "vllm serve m --no-enable-prefix-caching --enforce-eager --enable-chunked-prefill",
            {
                "model": "m",
                "enable_chunked_prefill": True,
                "enable_prefix_caching": False,
                "enforce_eager": True,
            },
        ),
        ("vllm serve --no-enable-prefix-caching m", {"model": "m", "enable_prefix_caching": False}),
        ("vllm serve --enforce-eager m", {"model": "m", "enforce_eager": True}),
        ("vllm serve m --enable-chunked-prefill False", {"model": "m", "enable_chunked_prefill": False}),
        ("vllm serve m --enable-chunked-prefill=false", {"model": "m", "enable_chunked_prefill": False}),
        ("vllm serve m --gpu-memory-utilization .85", {"model": "m", "gpu_memory_utilization": 0.85}),
        ("vllm serve 123 --quantization 456", {"model": "123", "quantization": "456"}),
        (
            "vllm serve m --async-scheduling -pp 2 -dp 3",
            {"model": "m", "pipeline_parallel": 2, "data_parallel": 3, "async_scheduling": True},
        ),
        ("FOO=1 nohup vllm serve m -tp 2 > log 2>&1 &", {"model": "m", "tensor_parallel": 2}),
        ("vllm serve m -tp 2 | tee --append log", {"model": "m", "tensor_parallel": 2}),
        (
            "python -m vllm.entrypoints.openai.api_server --model m -tp 2",
            {"model": "m", "tensor_parallel": 2},
        ),
        (
            "docker run --gpus all vllm/vllm-openai:v0.11 --model m -tp 2",
            {"model": "m", "tensor_parallel": 2},
        ),
        (
            "python -m vllm.entrypoints.openai.api_server --enforce-eager --model m",
            {"model": "m", "enforce_eager": True},
        ),
        ("bash -c 'cd /x && vllm serve m -tp 2'", {"model": "m", "tensor_parallel": 2}),
        ("vllm serve 'my models/m' # the good one", {"model": "my models/m"}),
    ],
)
def test_serve_command(command, values):
    assert parse_serve_command(command, where="x").values() == values


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("2k", 2000),
        ("2m", 2_000_000),
        ("2g", 2_000_000_000),
        ("2K", 2048),
        ("2M", 2 * 1024**2),
        ("2G", 2 * 1024**3),
        ("2.5", 2.5),
        ("2kk", "2kk"),
        ("true", True),
        ("False", False),
        ("None", ...),
        ("-1", "-1"),
        ("word", "word"),
    ],
)
def test_word_of_an_option_that_has_no_field(word, value):
    other = parse_serve_command(f"vllm serve m --some-option {word}", where="x").other

    assert other == ({} if value is ... else {"some_option": value})


def test_an_unknown_negated_switch_is_kept():
    settings = parse_serve_command("vllm serve m --no-such-thing", where="x")

    assert settings.other == {"no_such_thing": True}


def test_shell_script_with_continued_lines():
    script = """#!/bin/bash
# vllm serve old-model --max-num-seqs 1
export HF_HOME=/data

exec vllm serve org/m \\
    --max-num-seqs 64 \\
    --enable-journey-tracing \\
    --journey-tracing-sample-rate 1.0 \\
    --otlp-traces-endpoint http://collector:4317
"""
    settings = parse_serve_command(script, where="serve.sh")

    assert settings.values() == {"model": "org/m", "max_num_seqs": 64, "journey_tracing_sample_rate": 1.0}
    assert settings.other == {"enable_journey_tracing": True, "otlp_traces_endpoint": "http://collector:4317"}
    assert set(settings.sources.values()) == {"read"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no `vllm serve` command"),
        ("pip install vllm", "holds no `vllm serve` command"),
        ("vllm serve 'm", "is not a command line"),
        ("vllm serve m --max-num-seqs", "--max-num-seqs has no value"),
        ("vllm serve m --max-num-seqs --enforce-eager", "--max-num-seqs has no value"),
        ("vllm serve m --max-num-seqs 0", "max_num_seqs must be greater than or equal to 1"),
        ("vllm serve m --max-num-seqs lots", "max_num_seqs must be a whole number"),
        ("vllm serve m n", "model m and model n contradict"),
        ("vllm serve " + "x" * 70_000, "has a line of more than"),
        ("vllm " * 300_000, "is larger than"),
    ],
)
def test_command_that_cannot_be_read_is_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_serve_command(text, where="serve.sh")

    assert str(caught.value).startswith("serve.sh: ")
    assert "\n" not in str(caught.value)


# -- the server's log ------------------------------------------------------------------------------------

PREFIX = "(APIServer pid=7) INFO 02-14 05:02:14 [utils.py:233] "


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (
            "non-default args: {'model_tag': 'org/m', 'model': 'org/m', 'max_num_seqs': 64, 'enforce_eager': True}",
            {"model": "org/m", "max_num_seqs": 64, "enforce_eager": True},
        ),
        (
            "non-default args: {'model': 'm', 'compilation_config': CompilationConfig(level=3), 'max_num_seqs': 64}",
            {"model": "m", "max_num_seqs": 64},
        ),
        (
            "non-default args: {'max_num_seqs': None, 'gpu_memory_utilization': 0.5}",
            {"gpu_memory_utilization": 0.5},
        ),
        (
            "args: Namespace(model='org/m', tensor_parallel_size=2, enforce_eager=False, quantization=None)",
            {"model": "org/m", "tensor_parallel": 2, "enforce_eager": False},
        ),
        ("non-default args: {}", {}),
        ("non-default args: {" + "[" * 5000 + "}", {}),
        ("non-default args: {'max_num_seqs': 64, 'x': -" + "-" * 5000 + "1}", {"max_num_seqs": 64}),
        ("non-default args: {[]: 1}", {}),
        ("non-default args: {'a': '\\d', 'max_num_seqs': 64}", {"max_num_seqs": 64}),
        ("non-default args: {1, 2}", {}),
        ("non-default args: {'max_num_seqs': " + "9" * 5000 + "}", {}),
    ],
)
def test_logged_arguments(tmp_path, line, values):
    assert _read(tmp_path, f"starting\n{PREFIX}{line}\nready\n").values() == values


def _read(folder, text):
    (folder / "server.log").write_text(text)
    return read_settings(folder / "server.log")


def test_last_start_in_a_log_counts(tmp_path):
    log = "\n".join(f"{PREFIX}non-default args: {{'max_num_seqs': {n}}}" for n in (8, 16, 32))

    assert _read(tmp_path, log).max_num_seqs == 32


@pytest.mark.parametrize(
    ("args", "line", "budget"),
    [
        ("'max_num_seqs': 8", "Chunked prefill is enabled with max_num_batched_tokens=8192.", 8192),
        (
            "'max_num_seqs': 8",
            "Initializing: {'mode': 0, 'compile_ranges_endpoints': [512, 4096], 'x': 1}",
            4096,
        ),
        (
            "'max_num_batched_tokens': 256",
            "Chunked prefill is enabled with max_num_batched_tokens=8192.",
            256,
        ),
        ("'max_num_seqs': 8", "Chunked prefill is enabled with max_num_batched_tokens=" + "9" * 5000, None),
    ],
)
def test_the_token_budget_is_logged_after_the_arguments(tmp_path, args, line, budget):
    log = (
        f"{PREFIX}max_num_batched_tokens=1 of an earlier start\n{PREFIX}non-default args: {{{args}}}\n{PREFIX}{line}\n"
    )
    assert _read(tmp_path, log).max_num_batched_tokens == budget


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "holds no `vllm serve` command"),
        ("non-default args: {" + " " * 70_000 + "}", "holds no `vllm serve` command"),
        ("non-default args: {'max_num_seqs': 0}", "max_num_seqs must be greater than or equal to 1"),
        (
            "non-default args: {'max_num_seqs': __import__('os').getpid(), 'tp': -1}",
            "tp must be greater than or equal to 1",
        ),
    ],
)
def test_log_without_arguments_or_with_wrong_ones_is_one_line(tmp_path, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        _read(tmp_path, text)

    assert "\n" not in str(caught.value)


# -- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "max_num_seqs: 64"),
        ("exp-config.YML", "max_num_seqs: 64"),
        ("run.json", json.dumps({"max_num_seqs": 64})),
        ("serve.sh", "vllm serve --max-num-seqs 64"),
        ("command.txt", "vllm serve --max-num-seqs 64"),
        ("server.log", f"{PREFIX}non-default args: {{'max_num_seqs': 64}}\n"),
    ],
)
def test_a_file_is_read_by_its_kind(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode() + b"\n")

    assert read_settings(tmp_path / name).values() == {"max_num_seqs": 64}


def test_stray_bytes_in_a_log_do_no_harm(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"\xff\xfe\n" + PREFIX.encode() + b"non-default args: {'max_num_seqs': 64}\n\x80")

    assert read_settings(path).max_num_seqs == 64


def test_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.yaml: no such file or directory"):
        read_settings(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"settings": {}, "other": ["abc"]}',
        '{"settings": {}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 5000,
    ],
)
def test_settings_of_a_table_that_are_damaged_are_one_error(text):
    with pytest.raises(UsageError, match="settings column is damaged"):
        settings_from_json(text, where="runs")


def test_a_log_that_computed_fewer_prompt_tokens_saw_prefix_hits():
    """Seen on a real server whose load generator sent the same prompts in every round."""
    assert "prefix hits were seen: the steps computed 72 %" in context_remedy(2_295, 237_162, 2_553, 170_679)
    assert "microseconds" in context_remedy(846, 84_581, 846, 84_581)
    # A log of another server has fewer prompts than the spans have requests.
    assert "microseconds" in context_remedy(846, 84_581, 300, 30_000)
    assert "spans of the same requests" in context_remedy(0, 0, 846, 84_581)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("model: m\nenv:\n  OTEL_TRACES_SAMPLER: traceidratio\n  OTEL_TRACES_SAMPLER_ARG: '0.25'\n", 0.25),
        (
            (
                "model: m\nenv:\n- name: OTEL_TRACES_SAMPLER\n  value: parentbased_traceidratio\n"
                '- name: OTEL_TRACES_SAMPLER_ARG\n  value: "0.1"\n'
            ),
            0.1,
        ),
        ("model: m\nenvironment: [OTEL_TRACES_SAMPLER=always_off]\n", 0.0),
        ("model: m\nenvironment: [OTEL_TRACES_SAMPLER=parentbased_always_on]\n", None),
        ("model: m\n# OTEL_TRACES_SAMPLER=always_off\n", None),
        ("model: m\nenvironment: [OTEL_TRACES_SAMPLER=traceidratio, OTEL_TRACES_SAMPLER_ARG=much]\n", None),
        ("model: m\njourney_tracing_sample_rate: 0.5\nenv: {OTEL_TRACES_SAMPLER: always_off}\n", 0.5),
    ],
)
def test_a_sampler_in_the_environment_is_the_share_of_traced_requests(text, share):
    assert parse_settings(text, where="run.yaml").journey_tracing_sample_rate == share


def test_a_sampler_before_the_command_counts():
    command = "OTEL_TRACES_SAMPLER=traceidratio OTEL_TRACES_SAMPLER_ARG=0.2 vllm serve org/m"
    assert parse_serve_command(command, where="serve.sh").journey_tracing_sample_rate == 0.2
