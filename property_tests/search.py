"""How far property tests search: every test has its number of examples, and a run multiplies all of them."""

from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.unittest import TestCaseFunction
from hypothesis import settings


def search(items: Sequence[pytest.Item], share: float, **changed: Any) -> None:
    """Has the property tests among `items` try `share` times their examples; `changed` are more of their settings."""
    tests: set[Any] = {item.cls if isinstance(item, TestCaseFunction) else getattr(item, "obj", None) for item in items}
    for test in tests:
        for name in ("settings", "_hypothesis_internal_use_settings"):  # of a state machine, of a function
            if isinstance(own := getattr(test, name, None), settings):
                examples = max(1, round(own.max_examples * share))
                setattr(test, name, settings(own, max_examples=examples, **changed))
