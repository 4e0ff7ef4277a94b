"""One grid for all groups, and no group guessed (rule 8)."""

import pytest

from cpu_prefix_cache import ConfigurationError, Group, GroupKind, HybridChunkPlanner


def group(name="attention", tokens=16, size=1_000, kind=GroupKind.PREFIX):
    return Group(name=name, kind=kind, block_tokens=tokens, block_bytes=size)


def planner(*groups, max_model_len=4_096, **options):
    return HybridChunkPlanner(groups, max_model_len=max_model_len, **options)


def test_one_group_is_kept_block_by_block():
    one = planner(group(tokens=16, size=1_000))
    assert (one.grid_tokens, one.host_block_bytes, one.host_blocks_per_chunk, one.waste) == (16, 1_000, 1, 0.0)


def test_groups_meet_at_their_least_common_multiple():
    """S7.31"""
    two = planner(group("draft", 16), group("target", 24))
    assert two.grid_tokens == 48
    assert [piece.device_blocks for piece in two.pieces] == [3, 2]


def test_the_engines_own_grid_is_kept():
    assert planner(group(tokens=16), grid_tokens=64).pieces[0].device_blocks == 4
    with pytest.raises(ConfigurationError, match="not a multiple of the 16 tokens of a block of group 'attention'"):
        planner(group(tokens=16), grid_tokens=40)
    with pytest.raises(ConfigurationError, match="not a multiple"):
        planner(group(tokens=16), grid_tokens=0)


def test_a_hit_leaves_the_last_token_to_compute():
    """S7.27, O8.11, L5.6: a prompt exactly on a boundary gives up its last chunk."""
    one = planner(group(tokens=16))
    assert [one.hittable_chunks(tokens) for tokens in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]
    assert [one.full_chunks(tokens) for tokens in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


def test_a_piece_takes_whole_host_blocks():
    """Where one group's piece is a multiple of the other's, nothing is wasted."""
    two = planner(group("small", 16, 200_000), group("large", 16, 600_000))
    assert two.host_block_bytes == 200_000
    assert [piece.host_blocks for piece in two.pieces] == [1, 3]
    assert two.waste == 0.0


def test_waste_is_the_share_of_host_bytes_that_hold_nothing():
    two = planner(group("one", 16, 200_000), group("other", 16, 299_999))
    held = two.host_blocks_per_chunk * two.host_block_bytes
    assert two.waste == pytest.approx(1 - 499_999 / held)
    assert 0 < two.waste < 0.25


def test_a_grid_past_the_longest_sequence_names_who_made_it_so():
    with pytest.raises(ConfigurationError, match="'state' with blocks of 1056"):
        planner(group("attention", 16), group("state", 1_056), max_model_len=1_000)


def test_an_unknown_kind_is_never_taken_for_full_attention():
    with pytest.raises(ConfigurationError, match="unknown kind 'mystery'"):
        group(kind="mystery")


def test_groups_are_checked_at_the_door():
    with pytest.raises(ConfigurationError, match="at least one group"):
        planner()
    with pytest.raises(ConfigurationError, match="names must differ"):
        planner(group("same"), group("same"))
    with pytest.raises(ConfigurationError, match="block_tokens of at least 1"):
        group(tokens=0)
    with pytest.raises(ConfigurationError, match="block_bytes of at least 1"):
        group(size=0)
