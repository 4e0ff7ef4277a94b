"""`cpu-prefix-cache bench`, as far as it goes without a CUDA device: its report, its picture, its refusals."""

import json
import subprocess
import sys

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.tools.bench import measure
from cpu_prefix_cache.tools.bench.rates import Rate, draw, table
from cpu_prefix_cache.tools.cli import main
from cpu_prefix_cache.tools.replay.rate_options import number_or_file

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


def test_it_prints_what_was_measured_and_draws_and_writes_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(measure, "measure", lambda device: measure.Measured("A GPU/9, torch 9", LIMITS, RATES, 600.0))
    out = tmp_path / "rates.json"
    assert main(["bench", "--plot", str(tmp_path / "rates.svg"), "--json", str(out)]) == 0
    *_, slowest, link = capsys.readouterr().out.splitlines()
    assert slowest.split()[:3] == ["4", "KiB", "direct"]
    copies = "A GPU/9, torch 9: one large copy, store 50.0 GB/s, load 52.0 GB/s"
    assert link == f"{copies}; one large product of matrices, 600 TFLOPS"
    assert (tmp_path / "rates.svg").exists()
    written = json.loads(out.read_text())
    assert [number_or_file(name, str(out)) for name in ("host_rate", "tflops")] == [52.0, 600.0]
    assert written["rates"][0] == {"method": "staged", "fragment_bytes": 4096, "direction": "store", "gb_per_s": 50.0}


def test_a_machine_without_a_device_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench"]) == 2
    assert "there is no CUDA or HIP device 0 here: 0 were found" in capsys.readouterr().err


def test_a_missing_torch_is_named_with_its_install_command():
    program = (
        "import sys; sys.modules['torch'] = None; "
        "from cpu_prefix_cache.tools.cli import main; sys.exit(main(['bench']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install torch triton, or torch for ROCm" in result.stderr
