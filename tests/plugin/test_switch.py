"""Installed it does nothing; one variable or one flag switches it on, whichever scheduler the server would use."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import tracefit_vllm
from plugin.fake_vllm import FakeScheduler


class _Async(FakeScheduler):
    def __init__(self, vllm_config=None):
        super().__init__()


class _Sync(_Async):
    pass


@pytest.fixture
def config(monkeypatch, traced):
    """Put modules in vLLM's place; return its class of settings."""

    class SchedulerConfig:
        scheduler_cls = _Sync

        def get_scheduler_cls(self):
            return self.scheduler_cls

    places = {
        "vllm.config": {"SchedulerConfig": SchedulerConfig},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": _Async},
        "vllm.v1.core.sched.scheduler": {"Scheduler": _Sync},
    }
    for name, values in places.items():
        for at in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:at])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        vars(sys.modules[name]).update(values)
    traced()  # no recorder starts a process here
    return SchedulerConfig


def test_without_the_variable_nothing_is_touched(config, monkeypatch):
    monkeypatch.delenv("TRACEFIT_VLLM", raising=False)
    tracefit_vllm.register()
    assert config().get_scheduler_cls() is _Sync


def test_with_it_the_servers_own_choice_is_subclassed_once(config, monkeypatch, caplog):
    monkeypatch.setenv("TRACEFIT_VLLM", "1")
    tracefit_vllm.register()
    tracefit_vllm.register()  # vLLM may load plugins again
    made = config().get_scheduler_cls()
    assert made.__mro__[1] is _Sync
    assert made()._tracing is not None
    config.scheduler_cls = staticmethod(tracefit_vllm.Scheduler)
    assert config().get_scheduler_cls() is tracefit_vllm.Scheduler, "the flag is not traced twice"
    assert caplog.messages == []


@pytest.mark.parametrize(("is_async", "base"), [(True, _Async), (False, _Sync)])
def test_the_flag_takes_the_base_of_the_servers_mode(config, is_async, base):
    settings = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    made = tracefit_vllm.Scheduler(vllm_config=settings)
    assert type(made).__mro__[1] is base
    assert made._tracing is not None


def test_a_diffusion_model_gets_the_scheduler_it_needs(config, monkeypatch):
    """vLLM chooses it only where no flag names another."""
    module = ModuleType("vllm.v1.core.sched.diffusion_scheduler")
    module.DiffusionScheduler = type("DiffusionScheduler", (_Sync,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False), diffusion_config=object())
    assert type(tracefit_vllm.Scheduler(vllm_config=settings)).__mro__[1] is module.DiffusionScheduler


def test_vllm_without_the_hook_is_served_untraced(config, monkeypatch, caplog):
    monkeypatch.setenv("TRACEFIT_VLLM", "1")
    monkeypatch.delattr(config, "get_scheduler_cls")
    tracefit_vllm.register()
    (line,) = caplog.messages
    assert line.startswith("tracefit-vllm: no tracing, this version of vLLM is not known: ")


def test_a_plugin_that_cannot_be_imported_is_one_line_and_the_server_goes_on(config, monkeypatch, caplog):
    monkeypatch.setenv("TRACEFIT_VLLM", "1")
    monkeypatch.setitem(sys.modules, "tracefit_vllm.scheduler", None)
    tracefit_vllm.register()
    (line,) = caplog.messages
    assert line.startswith("tracefit-vllm: no tracing: ModuleNotFoundError: ")
    assert config().get_scheduler_cls() is _Sync


def test_another_plugin_around_ours_is_no_unknown_version(config, monkeypatch, caplog):
    monkeypatch.setenv("TRACEFIT_VLLM", "1")
    tracefit_vllm.register()
    ours = config.get_scheduler_cls

    def of_another_plugin(self):
        return ours(self)

    monkeypatch.setattr(config, "get_scheduler_cls", of_another_plugin)
    tracefit_vllm.register()
    assert config().get_scheduler_cls().__mro__[1] is _Sync
    assert caplog.messages == []


@pytest.mark.parametrize("chosen", [None, "scheduler", bool, 7])
def test_what_another_plugin_chooses_is_passed_on(config, monkeypatch, caplog, chosen):
    monkeypatch.setenv("TRACEFIT_VLLM", "1")
    config.scheduler_cls = chosen
    tracefit_vllm.register()
    assert config().get_scheduler_cls() is chosen
    (line,) = caplog.messages
    assert line.startswith("tracefit-vllm: no tracing")
