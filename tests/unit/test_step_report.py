"""Report of the steps that `benchmarks/vllm/serve.py --steps` notes."""

import json
from pathlib import Path

from benchmarks.vllm.step_report import table

EMPTY = {"tokens": 0, "requests": 0, "began": 1.0, "launch": 0.1, "gpu": 0.1, "loads": []}
STEPS = [
    EMPTY,
    {"tokens": 900, "requests": 2, "began": 2.0, "launch": 10, "gpu": 40, "loads": [[25.0, 1], [35.0, 2]]},
    {"tokens": 500, "requests": 3, "began": 2.06, "launch": 20, "gpu": 20, "loads": []},
    {"tokens": 3, "requests": 3, "began": 2.1, "launch": 4, "gpu": 8, "loads": []},
    {"tokens": 3, "requests": 3, "began": 9.0, "launch": 6, "gpu": 8, "loads": []},
    {"tokens": 3, "requests": 3, "began": 9.01, "launch": 6, "gpu": 8, "loads": []},
]


def write(folder: Path, steps: list[dict]) -> Path:
    file = folder / "ours-lazy@40.jsonl"
    file.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return file


def test_steps_with_a_prefill_are_apart_from_those_that_decode(tmp_path):
    row = table([write(tmp_path, STEPS)]).splitlines()[-1]
    assert row == "| ours-lazy@40 | 2 | 700 | 30.0 | 15.0 | 50.0 | 1 | 3 | 8.0 | 6.0 | 10.0 | 0.62 | 2 | 30.0 | 1.5 |"


def test_an_engine_without_a_gpu_has_no_time_there(tmp_path):
    row = table([write(tmp_path, [step | {"gpu": None} for step in STEPS])]).splitlines()[-1]
    assert row == "| ours-lazy@40 | 2 | 700 | 0.0 | 15.0 | 50.0 | 1 | 3 | 0.0 | 6.0 | 10.0 | 0.00 | 2 | 30.0 | 1.5 |"


def test_an_engine_that_ended_at_once_has_no_steps(tmp_path):
    assert table([write(tmp_path, [])]).splitlines()[-1].startswith("| ours-lazy@40 | 0 | 0 |")
