"""A vLLM server of a tiny model with random weights on this machine's CPU, and a client that counts what it gets."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "truncation": None,
    "padding": None,
}
READY_S = float(os.environ.get("SERVER_READY_S", "300"))
"""Three imports of vLLM, and a model of no size: half a minute, and ten times that on a machine with other work."""

REQUEST_S = 120


def install_plugin(folder: Path) -> Path:
    """Install the plugin into a folder, as pip does, and return the path to import it from."""
    source = shutil.copytree(ROOT / "pipeline/tracefit-vllm", folder / "source")  # where pip builds
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", folder / "site")
    subprocess.run([os.environ["SERVER_PYTHON"], "-m", "pip", "install", *options, source], check=True)
    return folder / "site"


def write_model(folder: Path, config: dict = CONFIG) -> Path:
    """Write what `vllm serve --load-format dummy` reads of a model."""
    folder.mkdir(parents=True)
    words = {
        "type": "WordLevel",
        "vocab": {f"w{n}": n for n in range(config["vocab_size"])},
        "unk_token": "w0",
    }
    documents = {
        "config.json": config,
        "tokenizer.json": {**TOKENIZER, "model": words},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def write_logging(folder: Path) -> Path:
    """Write a logging configuration: the output as it is by default, in whole seconds, and `fine.log` in
    microseconds."""
    handlers = {
        "output": {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stdout"},
        "fine": {"class": "logging.FileHandler", "formatter": "fine", "filename": str(folder / "fine.log")},
    }
    by_default = {
        "()": "vllm.logging_utils.NewLineFormatter",
        "datefmt": "%m-%d %H:%M:%S",
        "format": "%(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s",
    }
    document = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": by_default, "fine": {"format": "%(created).6f %(levelname)s %(message)s"}},
        "handlers": handlers,
        "loggers": {
            "vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False},
            "uvicorn": {"handlers": ["output"], "level": "INFO", "propagate": False},
        },
    }
    (folder / "logging.json").write_text(json.dumps(document))
    return folder / "logging.json"


@dataclass(frozen=True)
class Completion:
    """A streamed completion as its client saw it."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    text: str


class Server:
    """`vllm serve` of a small model, whose output goes to a file; usable once it is made."""

    def __init__(
        self, folder: Path, otlp_port: int | None, *options: str, config: dict = CONFIG, **environment: str
    ) -> None:
        self.model = write_model(folder / "model", config)
        self.log = folder / "server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [os.environ["SERVER_PYTHON"], "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        command += ["--port", str(self.port), "--load-format", "dummy", "--enforce-eager"]
        if otlp_port is not None:
            command += ["--otlp-traces-endpoint", f"http://127.0.0.1:{otlp_port}"]
        command += options
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OTEL_SERVICE_NAME": "tiny",
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        }
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **settings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait()
        except BaseException:  # the run's time may end here too
            self.kill()
            raise

    def _wait(self) -> None:
        if not self._ready.wait(READY_S):
            import pytest  # noqa: PLC0415 - an environment with vLLM, which writes a model too, has none

            pytest.skip(f"this machine is too slow: no server after {READY_S:.0f} s")
        while True:
            assert self._process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            with suppress(ConnectionRefusedError):  # its line comes before it listens
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            time.sleep(0.1)

    def _read(self) -> None:
        with self._process.stdout as output, self.log.open("wb") as log:
            for line in output:
                log.write(line)
                log.flush()
                if b"Application startup complete" in line:
                    self._ready.set()
        self._ready.set()

    @contextmanager
    def _stream(
        self, prompt: list[int] | list[list[int]], output_tokens: int, **more: object
    ) -> Iterator[Iterator[dict]]:
        body = {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        try:  # the server may be killed meanwhile
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            with response:
                yield (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))
        finally:
            connection.close()

    def complete(self, prompt: list[int] | list[list[int]], output_tokens: int, **more: object) -> Completion:
        """Stream one completion to its end; its tokens are those that the last chunk counts."""
        with self._stream(prompt, output_tokens, **more) as chunks:
            *of, last = chunks
        text = "".join(choice["text"] for chunk in of for choice in chunk["choices"])
        usage = last["usage"]
        return Completion(last["id"], usage["prompt_tokens"], usage["completion_tokens"], text)

    def abandon(self, prompt: list[int], output_tokens: int) -> None:
        """Begin a completion and go away after its first chunk."""
        with self._stream(prompt, output_tokens) as chunks:
            next(chunks)

    def complete_all(self, requests: list[tuple[list[int], int]], *, at_once: int) -> list[Completion]:
        """Stream completions, several at a time."""
        with ThreadPoolExecutor(at_once) as clients:
            return list(clients.map(lambda one: self.complete(*one), requests))

    def signal(self, number: int) -> None:
        """Send a signal to the server and its engine."""
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End as an operator does: what is buffered is sent."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._reader.join(60)  # its output has ended: no process that it began is left

    def kill(self) -> None:
        """End the server and its engine at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(10)
