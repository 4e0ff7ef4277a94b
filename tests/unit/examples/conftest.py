"""The example with models and documents that are small enough for tests. It is imported where torch is surely there."""

import pytest

DEVICE_BYTES = {"full": "1MB", "swa": "900kB", "hybrid": "500kB", "mla": "500kB"}  # of two documents


@pytest.fixture
def small_model(monkeypatch):
    import offline_generation
    from builtin_models import build_model

    monkeypatch.setattr(offline_generation, "LEAST", 400)
    monkeypatch.setattr(offline_generation, "MOST", 800)
    monkeypatch.setattr(offline_generation, "DEVICE_BYTES", DEVICE_BYTES)
    monkeypatch.setattr(
        offline_generation, "build_model", lambda arch: build_model(arch, hidden=64, layers=2 if arch == "full" else 4)
    )
