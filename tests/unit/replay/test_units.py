import pytest

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.units import parse_capacity, show_bytes


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("1", 1), ("30000", 30_000), ("10GiB", 10 * 2**20), ("10 gib", 10 * 2**20), ("1MB", 976), ("1.5KiB", 1)],
)
def test_a_capacity_is_blocks_or_whole_blocks_of_bytes(text, blocks):
    assert parse_capacity(text, 1024) == blocks


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "GiB", "10XB", "1B", "0GiB", "1e3", "1_000", "٣"])
def test_texts_that_are_no_capacity_are_refused(text):
    with pytest.raises(ConfigurationError):
        parse_capacity(text, 1024)


def test_bytes_need_to_know_what_a_block_weighs():
    with pytest.raises(ConfigurationError, match="--bytes-per-token or --model"):
        parse_capacity("1GiB", None)


def test_bytes_are_shown_in_the_unit_that_fits():
    assert [show_bytes(count) for count in (0, 1023, 1024, 3 * 2**39, 2**70)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 TiB",
        "1048576.0 PiB",
    ]
