"""Models of the example that are small enough for tests."""

import pytest

import offline_generation_inputs
from builtin_models import build_model


@pytest.fixture
def small_model(monkeypatch):
    """The built-in models, smaller, and documents of which the device holds one."""
    monkeypatch.setattr(offline_generation_inputs, "DOCUMENT_TOKENS", (400, 800))
    layers = {"full": 2}
    monkeypatch.setattr(
        offline_generation_inputs, "build_model", lambda arch: build_model(arch, hidden=64, layers=layers.get(arch, 4))
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A local checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build_model("full", hidden=32, layers=1).save_pretrained(folder)
    return folder
