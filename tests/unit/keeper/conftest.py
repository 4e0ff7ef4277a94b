import pytest

from cpu_prefix_cache.keeper import questions


@pytest.fixture
def patience(monkeypatch):
    """A keeper on a busy machine answers late; a test that wants its answers takes this."""
    monkeypatch.setattr(questions, "ASK_SECONDS", 10.0)
