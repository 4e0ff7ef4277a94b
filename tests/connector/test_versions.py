"""The tested releases of transformers: the warning for others, and that the pins of CI are the ends of the range."""

import re
from pathlib import Path

import pytest

from builtin_models import build_model
from connector.transformers import HostPrefixCache
from connector.transformers.versions import FIRST, LAST, is_tested, warn_if_untested

PINS = Path(__file__).parents[2] / "requirements"
NAME = "connector.transformers.versions"
VERSION = f"{NAME}.transformers.__version__"


@pytest.fixture
def warns_again():
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


@pytest.mark.parametrize(
    ("file", "release"), [("constraints.txt", FIRST), ("constraints-transformers-newest.txt", LAST)]
)
def test_ci_runs_both_ends_of_the_range(file, release):
    [pin] = re.findall(r"^transformers==(\d+)\.(\d+)\.\d+$", (PINS / file).read_text(), re.MULTILINE)
    assert tuple(map(int, pin)) == release


@pytest.mark.parametrize("number", ["5.19.0", "5.21.1", "5.24.0"])
def test_a_release_within_the_range_is_tested(number):
    assert is_tested(number)


@pytest.mark.parametrize("number", ["5.18.3", "4.57.1", "5.25.0", "6.0.0", "5.24.0.dev0", "main"])
def test_another_release_runs_with_one_warning(number, monkeypatch, caplog, warns_again):
    monkeypatch.setattr(VERSION, number)
    model = build_model("full", hidden=32, layers=1)
    for _ in range(2):
        HostPrefixCache(model, host_bytes="4MiB").close()
    assert [record.getMessage() for record in caplog.records if record.name == NAME] == [
        f"HostPrefixCache was tested with transformers 5.19 to 5.24; this is {number}"
    ]


def test_control_a_tested_release_runs_without_a_warning(monkeypatch, caplog, warns_again):
    monkeypatch.setattr(VERSION, "5.20.0")
    HostPrefixCache(build_model("full", hidden=32, layers=1), host_bytes="4MiB").close()
    assert [record for record in caplog.records if record.name == NAME] == []
