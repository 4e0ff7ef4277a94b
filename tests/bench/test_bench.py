"""`cpu-prefix-cache bench`, as far as it goes without a CUDA device: what it says, what it draws, what it refuses."""

import subprocess
import sys

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.bench.measure import FRAGMENTS, _direct_from
from cpu_prefix_cache.bench.rates import Rate, draw, table
from cpu_prefix_cache.cli import main

RATES = [
    Rate("staged", 4096, "store", 50.0),
    Rate("staged", 4096, "load", 52.0),
    Rate("direct", 4096, "store", 5.0),
    Rate("direct", 4096, "load", 3.0),
]
LIMITS = {"store": 50.0, "load": 52.0}


def test_every_rate_has_its_share_of_the_limit_of_its_direction():
    head, *lines = table(RATES, LIMITS).splitlines()
    assert head.split()[:4] == ["fragment", "method", "direction", "GB/s"]
    assert [line.split()[-2:] for line in lines] == [
        ["100.0%", "#" * 20],
        ["100.0%", "#" * 20],
        ["10.0%", "##"],
        ["5.8%", "#"],
    ]


def test_it_is_drawn(tmp_path):
    draw(str(tmp_path / "rates.png"), "a machine", RATES, LIMITS)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="ends in one of"):
        draw(str(tmp_path / "rates.txt"), "", RATES, LIMITS)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        draw(str(tmp_path / "no" / "rates.png"), "", RATES, LIMITS)


def rates(direct_from):
    """Direct copies are as good as staged ones from that size on, one way."""
    found = {}
    for size in FRAGMENTS:
        found.update({("staged", size, way): 50.0 for way in LIMITS})
        found.update({("direct", size, "load"): 50.0, ("direct", size, "store"): 50.0 if size >= direct_from else 48.0})
    return found


@pytest.mark.parametrize("size", FRAGMENTS)
def test_direct_copies_are_good_from_the_size_on_from_which_they_are_both_ways(size):
    assert _direct_from(rates(size)) == size


def test_if_they_never_are_no_block_is_large_enough():
    assert _direct_from(rates(1 << 40)) == 2 * FRAGMENTS[-1]


def test_a_good_size_below_a_bad_one_does_not_count():
    found = rates(FRAGMENTS[0])
    found["direct", FRAGMENTS[3], "load"] = 1.0
    assert _direct_from(found) == FRAGMENTS[4]


def test_without_a_device_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench"]) == 2
    assert "there is no CUDA device 0 here: 0 were found" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None; from cpu_prefix_cache.cli import main; sys.exit(main(['bench']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'cpu-prefix-cache[cuda]'" in result.stderr
