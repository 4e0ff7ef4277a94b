"""Tokens that would hit with partial tails, as counted for docs/design_connectors.md."""

import pytest

from benchmarks.deciding.partial_tails import found
from cpu_prefix_cache.tools.replay.trace_file import TraceRequest

UNIT = 32


def prompts(*lengths_and_keys):
    """Prompts of so many tokens, with a letter for the key of each of their blocks of 512."""
    return [TraceRequest(now, [*map(str.encode, keys)], tokens) for now, (tokens, keys) in enumerate(lengths_and_keys)]


def hits(block, *lengths_and_keys):
    """Hits of the last prompt: tokens at blocks, and with tails."""
    made = prompts(*lengths_and_keys)
    before, after = found(made[:-1], block, UNIT), found(made, block, UNIT)
    return after.at_blocks - before.at_blocks, after.with_tails - before.with_tails


def test_a_prompt_that_continues_one_resumes_behind_its_last_block():
    assert hits(512, (1100, "ab"), (1300, "ab")) == (1024, 1088)
    assert hits(1024, (1100, "ab"), (1300, "ab")) == (1024, 1088)
    assert hits(2048, (1100, "ab"), (1300, "ab")) == (0, 1088)


def test_nothing_is_behind_a_block_that_differs():
    assert hits(512, (1100, "ab"), (1300, "ax")) == (0, 0)


def test_the_last_token_is_computed():
    assert hits(512, (1100, "ab"), (1089, "ab")) == (1024, 1088)
    assert hits(512, (1100, "ab"), (1088, "ab")) == (1024, 1024)
    assert hits(512, (1024, "ab"), (1024, "ab")) == (512, 992)


def test_a_third_prompt_resumes_where_the_second_parted():
    assert hits(512, (1600, "abc"), (1600, "axy"), (1600, "aop")) == (512, 512)


@pytest.mark.parametrize("block", [512, 1024])
def test_tails_as_long_as_blocks_add_nothing(block):
    made = prompts((1100, "ab"), (1700, "abc"), (900, "a"), (2600, "abcde"))
    counted = found(made, block, unit=block)
    assert counted.at_blocks == counted.with_tails > 0 and counted.more == 0
