"""What all tests of replays share."""

import gc

import pytest


@pytest.fixture(autouse=True)
def no_collections_before_replays(monkeypatch):
    """A replay begins with a collection of garbage, which takes a quarter second where torch was imported."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
