"""A run without the engines' sources does not look like a full one."""

from pathlib import Path

from tests.engines.left_out import last_line, left_out, number_of_tests

HERE = Path(__file__).parent
NO_ATOM, NO_NANO = "atom is not here", "nano-vllm is not here"
FILES = {HERE / "test_nano_vllm.py", HERE / "test_radix_engine.py", HERE / "atom" / "test_device.py"}


def test_tests_left_out_are_counted_by_their_reason():
    counts = left_out(FILES, NO_ATOM, NO_NANO)
    device, nano = (number_of_tests(HERE / name) for name in ("atom/test_device.py", "test_nano_vllm.py"))
    assert sorted(counts.values()) == sorted((device, nano)) and device > 5 and nano > 1
    line = last_line(counts)
    assert line.startswith("NOT A FULL RUN") and f"{device} tests ({NO_ATOM})" in line and f"{nano} tests (nano" in line


def test_a_full_run_prints_no_last_line():
    assert last_line(left_out(FILES, None, None)) == ""
