"""megatron-core on a CPU: what is patched exists in the pinned version, is all there is, and CUDA switches it off."""

import importlib
from importlib.metadata import version

import pytest
import torch

from longstraw_core.training import cpu_megatron


def test_it_is_written_for_the_installed_version() -> None:
    assert version("megatron-core") == "0.16.1"


def test_every_patched_name_exists() -> None:
    for name in cpu_megatron.PATCHED_MODULES:
        module = importlib.import_module(name)
        assert hasattr(module, "torch"), name
    assert all(callable(getattr(torch, factory)) for factory in cpu_megatron.FACTORIES)
    assert callable(torch.cuda.current_device)


def test_nothing_happens_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [importlib.import_module(name) for name in cpu_megatron.PATCHED_MODULES]
    for module in modules:
        monkeypatch.setattr(module, "torch", torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_megatron.use_cpu() is False
    assert all(module.torch is torch for module in modules)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched with CUDA")
def test_patched_modules_allocate_on_the_cpu_and_torch_itself_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [importlib.import_module(name) for name in cpu_megatron.PATCHED_MODULES]
    for module in modules:
        monkeypatch.setattr(module, "torch", torch)
    factories = {name: getattr(torch, name) for name in cpu_megatron.FACTORIES}
    current_device = torch.cuda.current_device
    assert cpu_megatron.use_cpu() is True
    for module in modules:
        assert module.torch.zeros(2, device="cuda").device.type == "cpu"
        assert module.torch.tensor([1.0], device="cuda:1").device.type == "cpu"
        assert module.torch.cuda.current_device() == torch.device("cpu")
        assert module.torch.zeros(2, device="meta").device.type == "meta"
        assert module.torch.float32 is torch.float32
    patched = [module.torch for module in modules]
    assert cpu_megatron.use_cpu() is True
    assert [module.torch for module in modules] == patched
    assert {name: getattr(torch, name) for name in cpu_megatron.FACTORIES} == factories
    assert torch.cuda.current_device is current_device
