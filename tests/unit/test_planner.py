"""One grid for all groups, what each keeps of it, and no group guessed (rules 8 and 9)."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup, Group, HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model import planner as planners
from cpu_prefix_cache.model.planner import FAR_CHUNKS
from cpu_prefix_cache.model.report import advice, conversation_bytes, describe, everything_bytes, group_waste


def group(name="attention", tokens=16, size=1_000, kind=PrefixGroup, **options):
    return kind(name=name, block_tokens=tokens, block_bytes=size, **options)


def window(sees, tokens=16, extra=0, **options):
    return group("window", tokens, kind=WindowGroup, window_tokens=sees, extra_tokens=extra, **options)


def local(length, tokens=16):
    return group("local", tokens, kind=ChunkLocalGroup, window_tokens=length)


def state(tokens=16, size=1_000):
    return group("state", tokens, size, StateGroup)


def needed(one, *boundaries):
    return [list(one.needed(boundary)) for boundary in boundaries]


def planner(*groups, max_model_len=4_096, **options):
    return HybridChunkPlanner(groups, max_model_len=max_model_len, **options)


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


def test_the_smallest_host_block_is_tried_too():
    """Pieces just short of 2, 3 and 5 times 192 KiB: no whole part of one of them suits the others."""
    least = 192 * 1024
    three = planner(*(group(f"times {each}", 16, each * (least - 512)) for each in (2, 3, 5)))
    assert three.host_block_bytes == least
    assert [piece.host_blocks for piece in three.pieces] == [2, 3, 5]
    assert three.waste < 0.01


def test_waste_is_the_share_of_host_bytes_that_hold_nothing():
    two = planner(group("one", 16, 200_000), group("other", 16, 299_999))
    held = two.host_blocks_per_chunk * two.host_block_bytes
    assert two.waste == pytest.approx(1 - 499_999 / held)
    assert 0 < two.waste < 0.25


def test_a_local_chunk_needs_nothing_where_it_begins():
    assert needed(local(64), 48, 64, 80, 96, 128) == [[0, 1, 2], [], [4], [4, 5], []]
    assert needed(local(40), 48) == [[2]], "it began at 40, within block 2"


def test_a_boundary_where_every_local_chunk_begins_needs_no_checkpoint():
    mixed = planner(group(tokens=16), local(64))
    assert [mixed.needs_checkpoint(depth) for depth in range(6)] == [False, True, True, True, False, True]
    assert [mixed.unaided_depth(depth) for depth in (7, 3, 4, 9)] == [4, 0, 4, 8]
    assert mixed.has_checkpoints
    assert not planner(group(tokens=16)).has_checkpoints


def test_states_may_be_all_that_there_is_beside_prefixes():
    assert planner(group(tokens=16), state()).has_states_alone and planner(state()).has_states_alone
    assert not planner(group(tokens=16)).has_states_alone
    assert not planner(group(tokens=16), window(40), state()).has_states_alone


def test_a_group_of_which_all_ranks_have_the_same_takes_all_lanes():
    once = planner(group(size=8_000, lanes=1), ranks=8)
    each = planner(group(size=8_000), ranks=8)
    assert (once.host_block_bytes, each.host_block_bytes) == (8_000, 64_000)
    assert (once.pieces[0].lanes, each.pieces[0].lanes, each.lane_bytes) == (1, 8, 8_000)
    assert conversation_bytes(once, 160) == 80_000
    assert conversation_bytes(each, 160) == 640_000
    with pytest.raises(ConfigurationError, match="ranks must be at least 1"):
        planner(group(), ranks=0)


def test_under_context_parallelism_a_block_covers_the_tokens_of_all_ranks():
    apart = planner(group(tokens=2 * 16), ranks=2)
    assert apart.grid_tokens == 32
    assert conversation_bytes(apart, 64) == conversation_bytes(planner(group(tokens=16)), 64)


def test_everything_is_each_block_of_each_group():
    assert everything_bytes(planner(group(tokens=32), window(40, tokens=16)), 96) == (3 + 6) * 1_000


def test_a_group_that_leaves_its_host_blocks_empty_gets_advice():
    small = planner(group(size=100_000), window(20, size=140_000))
    assert group_waste(small, 1) == pytest.approx(0.3)
    assert advice(small) == [
        "group 'window' leaves 30% of its host blocks empty: its pieces of 140,000 bytes take 2 host blocks of "
        "100,000; blocks of about 22 tokens would fill them"
    ]
    assert describe(small).endswith(advice(small)[0])
    (page,) = advice(planner(group(size=100_000), state(size=140_000)))
    assert "a page is one value and cannot be split" in page
    (chunk,) = advice(planner(group(tokens=1_024, size=140_000), state(tokens=1_024, size=10_000_000)))
    assert "a grid of about 1406 tokens would fill them" in chunk


def test_ranks_are_named_where_there_are_several():
    assert "ranks" not in describe(planner(group())) and "on each of 2 ranks" in describe(planner(group(), ranks=2))


def test_a_grid_too_long_for_any_prompt_names_its_cause_and_a_remedy():
    """Rule 8."""
    with pytest.raises(
        ConfigurationError, match=r"at 1056 tokens, past max_model_len 1000; group 'state' with blocks of"
    ):
        planner(group(tokens=16), state(tokens=1_056), max_model_len=1_000)
    with pytest.raises(
        ConfigurationError, match="others meet every 16 tokens, so a multiple of 16 up to 1000 would do"
    ):
        planner(group(tokens=16), state(tokens=1_056), max_model_len=1_000)
    with pytest.raises(ConfigurationError, match="group 'attention' with blocks of 32 tokens makes it so; at most 20"):
        planner(group(tokens=32), max_model_len=20)
    with pytest.raises(ConfigurationError, match="others meet only at 63, too; sizes up to 62 that divide one another"):
        planner(group("a", 7), group("b", 9), group("c", 11), max_model_len=62)
    for longest in (90, 16):
        with pytest.raises(ConfigurationError, match=f"96 tokens is past max_model_len {longest}; a multiple of 16"):
            planner(group(tokens=16), grid_tokens=96, max_model_len=longest)


def test_a_grid_ends_blocks_of_windows_and_states_too():
    with pytest.raises(ConfigurationError, match="not a multiple of the 64 tokens of a block of group 'window'"):
        planner(group(tokens=16), window(100, tokens=64), grid_tokens=32)


def test_a_group_is_of_a_kind():
    with pytest.raises(TypeError, match="abstract"):
        group(kind=Group)


def test_groups_are_checked_at_the_door():
    with pytest.raises(ConfigurationError, match="at least one group"):
        planner()
    with pytest.raises(ConfigurationError, match="names must differ"):
        planner(group("same"), group("same"))
    with pytest.raises(ConfigurationError, match="block_tokens of at least 1"):
        group(tokens=0)
    with pytest.raises(ConfigurationError, match="block_bytes of at least 1"):
        group(size=0)
    with pytest.raises(ConfigurationError, match="'window' needs window_tokens of at least 1, got 0"):
        window(0)
    with pytest.raises(ConfigurationError, match="'window' needs extra_tokens of at least 0, got -1"):
        window(8, extra=-1)
    with pytest.raises(ConfigurationError, match=r"'attention' needs lookahead_tokens of at least 0, got 0\.5"):
        group(lookahead_tokens=0.5)
    with pytest.raises(TypeError, match=r"PrefixGroup.* 'window_tokens'"):
        group(window_tokens=128)
    with pytest.raises(TypeError, match=r"WindowGroup.* 'lookahead_tokens'"):
        window(8, lookahead_tokens=1)
    with pytest.raises(TypeError, match=r"StateGroup.* 'extra_tokens'"):
        group(kind=StateGroup, extra_tokens=1)
    with pytest.raises(ConfigurationError, match="device_blocks of at least 1"):
        group(device_blocks=0)


def test_waste_is_weighed_where_local_chunks_of_many_lengths_are_nearly_full():
    lengths = (2, 3, 4, 5, 6, 7, 8, 9, 10, 14, 15, 16, 21, 25, 27, 32)
    assert [len(local(16 * chunks).needed(16 * FAR_CHUNKS)) for chunks in lengths] == [each - 1 for each in lengths]


def test_a_block_is_chosen_with_one_look_at_each_size(monkeypatch):
    """A model of 266,000 candidates took a keeper ten seconds, which looked for the least waste at each of them."""
    looks = []
    monkeypatch.setattr(planners, "min", lambda *given: looks.append(given) or min(*given), raising=False)
    planner(group("small", size=1), group("large", size=10_000))
    assert len(looks) < 10
