"""vLLM's own scheduler under the plugin, with drawn outputs in place of a model's: `drive_scheduler.py FOLDER`, by an
interpreter with vLLM.

Each scenario writes `NAME/traces.pb`, what the plugin sends, and `NAME/truth.json`, what a worker of these steps and a
client of these requests would count: it is taken from neither the plugin nor the scheduler's state, except for the
queue's depths. The plugin wraps vLLM's two schedulers, and that of a `--scheduler-cls`: Dynamo's where it is installed,
else a stand-in with its methods.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import random
import socket
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import tracefit_vllm
from tracefit_vllm import scheduler as plugin
from tracefit_vllm.export import to_otlp
from tracefit_vllm.records import Header
from tracefit_vllm.spans import SpanBuilder
from vllm_server.real_server import write_model

BLOCK = 16
DRAFTS = 3
REQUESTS = 120
SCENARIOS = {
    "plain": {},
    "preempted": {"blocks": 40},
    "prefixes": {"is_cached": True, "blocks": 60},
    "drafts": {"drafts": DRAFTS},
    "drafts-preempted": {"drafts": DRAFTS, "blocks": 44},
    "remote": {"is_remote": True, "is_cached": True, "blocks": 80},
    "rank": {"rank": 1, "resets": True},
}
KINDS = ("async", "sync", "other")


class StandIn(AsyncScheduler):
    """Overrides what Dynamo's scheduler does, to publish each step's tokens once they are computed."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._publisher = SimpleNamespace(publish=None)

    def has_requests(self):
        return super().has_requests()

    def schedule(self, *args, **options):
        return super().schedule(*args, **options)

    def update_from_output(self, scheduler_output, model_runner_output):
        result = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._publisher.publish(scheduler_output.num_scheduled_tokens)
        return result

    def shutdown(self):
        self._publisher = None
        super().shutdown()


OTHER = "vllm_server.drive_scheduler.StandIn"
if importlib.util.find_spec("dynamo"):
    OTHER = "dynamo.vllm.instrumented_scheduler.InstrumentedScheduler"  # as its worker names it


class Connector(KVConnectorBase_V1):
    """A remote KV cache that has the first two blocks of half of the prompts: some are waited for, some are not."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        kind = int(request.request_id[5:13], 16) % 4
        found = 2 * BLOCK - num_computed_tokens
        if kind > 1 or found <= 0 or request.num_prompt_tokens <= 2 * BLOCK or request.num_output_tokens:
            return 0, False
        return found, kind == 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens and int(request.request_id[5:13], 16) % 4 == 0:
            LOADING.append(request.request_id)

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


LOADING: list[str] = []


class Kept:
    """In place of a recorder: keeps records, and says whether one changed after it was handed over."""

    def __init__(self, header):
        self.header, self.records, self.why = header, [], None

    def put(self, record, weight=1):
        self.records.append((record, marshal.dumps(record)))

    def end(self, why):
        self.why = why

    def close(self):
        pass


def make_config(model, *, drafts=0, is_cached=False, is_remote=False, rank=0, **_):
    args = EngineArgs(model=str(model), load_format="dummy", enforce_eager=True, block_size=BLOCK)
    args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens = 1024, 16, 128
    args.enable_prefix_caching = is_cached
    if drafts:
        args.speculative_config = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 3,
        }
    if is_remote:
        args.kv_transfer_config = KVTransferConfig(
            kv_connector="Connector",
            kv_role="kv_both",
            kv_connector_module_path="vllm_server.drive_scheduler",
        )
    config = args.create_engine_config()
    config.parallel_config.data_parallel_index = rank
    return config


def make_scheduler(kind, config, blocks):
    """Return a scheduler of the class that vLLM chooses with the plugin on, and its recorder."""
    config.cache_config.num_gpu_blocks = blocks
    settings = config.scheduler_config
    settings.async_scheduling, settings.scheduler_cls = kind != "sync", OTHER if kind == "other" else None
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    kept: list[Kept] = []

    def recorder(header):
        kept.append(Kept(header))
        return kept[0]

    plugin.Tracing.__init__.__defaults__ = (recorder,)
    made = settings.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    return made, kept[0]


class Worker:
    """State of a model's worker: for each request the tokens in its KV cache, and those it drew."""

    def __init__(self, draw, drafts):
        self.draw, self.drafts = draw, drafts
        self.kv: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.first: dict[str, int] = {}

    def execute(self, output, prompts):
        """Return the tokens in the cache before the step of each request in it, and the step's outputs."""
        for new in output.scheduled_new_reqs:
            self.kv[new.req_id], self.length[new.req_id] = new.num_computed_tokens, prompts[new.req_id]
            self.first.setdefault(new.req_id, new.num_computed_tokens)
        others = output.scheduled_cached_reqs
        for at, name in enumerate(others.req_ids):
            if name in others.resumed_req_ids:
                self.kv[name] = others.num_computed_tokens[at]
                self.length[name] = prompts[name] + others.num_output_tokens[at]
        names = list(output.num_scheduled_tokens)
        before = {name: self.kv[name] for name in names}
        sampled = []
        for name in names:
            self.kv[name] += output.num_scheduled_tokens[name]
            got = 0
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if self.kv[name] - drafted >= self.length[name]:
                accepted = self.draw.randint(0, drafted)
                self.kv[name] -= drafted - accepted
                got = 1 + accepted
                self.length[name] += got
            sampled.append([7] * got)
        index = {name: at for at, name in enumerate(names)}
        return before, ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)


def drive(  # noqa: C901, PLR0915 - an engine's loop, as vLLM's is
    kind, config, *, drafts=0, blocks=2000, is_remote=False, resets=False, is_cached=False, **_
):
    draw = random.Random(3)
    engine, kept = make_scheduler(kind, config, blocks)
    published = []
    if kind == "other":
        engine._publisher.publish = published.append
    LOADING.clear()
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if is_cached else None
    worker, flight = Worker(draw, drafts), deque()
    prompts, outputs, status, preempted, steps = {}, {}, {}, {}, []

    def deliver():
        output, result = flight.popleft()
        if is_remote and LOADING and draw.random() < 0.4:
            result.kv_connector_output = KVConnectorOutput(finished_recving={LOADING.pop(0)})
        for of_client in engine.update_from_output(output, result).values():
            for one in of_client.outputs:
                outputs[one.request_id] += len(one.new_token_ids)
                if one.finish_reason is not None:
                    status.setdefault(one.request_id, str(one.finish_reason))
        if drafts and kind == "sync":
            names = [n for n, got in zip(result.req_ids, result.sampled_token_ids, strict=True) if got]
            engine.update_draft_token_ids(DraftTokenIds(names, [[9] * draw.randint(0, drafts) for _ in names]))

    step = 0
    while (len(prompts) < REQUESTS or len(status) < len(prompts)) and step < 20_000:
        if len(prompts) < REQUESTS and draw.random() < 0.3:
            for _ in range(draw.choice((1, 1, 6))):
                name = f"cmpl-{len(prompts):08x}{0:024x}-0-{len(prompts):08x}"
                tokens = [draw.randrange(3, 500) for _ in range(draw.randint(1, 200))]
                if is_cached and draw.random() < 0.5:
                    tokens = [5] * (3 * BLOCK) + tokens
                limits = SamplingParams(max_tokens=draw.randint(1, 60), ignore_eos=True)
                prompts[name], outputs[name], preempted[name] = len(tokens), 0, 0
                engine.add_request(Request(name, tokens, limits, None, block_hasher=hasher))
        open_ = [n for n in prompts if n not in status]
        if open_ and draw.random() < 0.01:
            gone = draw.choice(open_)
            status[gone] = "abort"
            engine.finish_requests(draw.choice((gone, [gone], iter([gone, "none"]))), RequestStatus.FINISHED_ABORTED)
        if resets and draw.random() < 0.01:
            engine.reset_prefix_cache(reset_running_requests=True)
        counts = {r.request_id: r.num_preemptions for r in engine.requests.values()}
        had = {name: outputs[name] for name in prompts}
        output = engine.schedule()
        step += 1
        preempted |= counts | {r.request_id: r.num_preemptions for r in engine.requests.values()}
        before, result = worker.execute(output, prompts)
        of = [(n, tokens, before[n], had[n]) for n, tokens in output.num_scheduled_tokens.items()]
        steps.append([step, of, len(engine.running), sum(engine.get_request_counts()) - len(engine.running)])
        flight.append((output, result))
        while len(flight) > (kind != "sync"):
            deliver()
    while flight:
        deliver()
    assert len(status) == len(prompts) >= REQUESTS, "requests are left"
    assert kept.why is None, kept.why
    assert kind != "other" or len(published) == sum(bool(of) for _, of, *_ in steps), "not all is published"
    engine.shutdown()
    for record, at_first in kept.records:
        assert marshal.loads(at_first) == record, "a record changed after it was handed over"  # noqa: S302
    requests = [(n, prompts[n], outputs[n], preempted[n], worker.first.get(n), status[n]) for n in prompts]
    return kept, {"steps": steps, "requests": requests}


def main(folder: Path) -> None:
    os.environ["TRACEFIT_VLLM"] = "1"
    tracefit_vllm.register()
    model = write_model(folder / "model")
    for name, options in SCENARIOS.items():
        for kind in KINDS:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["DYN_FORWARDPASS_METRIC_PORT"] = str(free.getsockname()[1])
            kept, truth = drive(kind, make_config(model, **options), **options)
            builder = SpanBuilder(Header(*kept.header), seed=0)
            made = [s for record, _ in kept.records for s in builder.feed(record)] + list(builder.close())
            resource = Resource.create({"service.name": "driven"})
            out = folder / f"{name}-{kind}"
            out.mkdir()
            (out / "traces.pb").write_bytes(encode_spans([to_otlp(s, resource) for s in made]).SerializeToString())
            (out / "truth.json").write_text(json.dumps(truth))
    print(OTHER)  # noqa: T201 - for its caller


if __name__ == "__main__":
    main(Path(sys.argv[1]))
