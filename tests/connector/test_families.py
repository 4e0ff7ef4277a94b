"""Every family of models, served with the cache as without it; and every comparison shown to see a wrong piece.

A story runs `generate` with a cache whose device is small, so that repeated prompts come back from the host, and plain
`generate`. The tokens must be the same, and the logits of every step within 1e-4 of their deviation. Blocks are of 16
tokens; windows and chunks of attention reach over 32.

    documents     repeated once they have left the device, on and beside every kind of boundary
    branches      two prompts part inside a chunk, and a third finds where they did
    reset         the device forgets everything, the host does not
    beginnings    a prompt that begins another

The controls damage one piece of one group, on the host's side and on the device's: 3 of 4 prompts must show it.
"""

from collections import defaultdict

import pytest

from cpu_prefix_cache import POLICIES
from cpu_prefix_cache.deciding import Direction, GroupCopy, WindowGroup
from cpu_prefix_cache.model.hashing import ChainHasher, checkpoint_key
from cpu_prefix_cache.testing import CorruptingCopier, MeddlingCopier
from random_models import FAMILIES
from tests.connector.running import BLOCK, document, last_boundary
from tests.connector.serving import Pair, on_host

LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 81, 112, 113)
SEEN = 3  # of 4 damaged prompts

families = pytest.mark.parametrize("family", FAMILIES)
# Every family as by default; the policies and the other mode with one kind of group, and with several.
BY_DEFAULT = [(family, "lru", "lazy") for family in FAMILIES]
OTHERWISE = [(family, policy, "eager") for family in ("llama", "qwen3_next") for policy in POLICIES]


@pytest.mark.parametrize(("family", "policy", "mode"), BY_DEFAULT + OTHERWISE)
def test_documents_come_back_up_to_their_last_boundary(family, policy, mode):  # S7.27, O8.11
    pair = Pair(family, mode, policy=policy)
    for length in LENGTHS:
        assert pair.ask_right(document(length, length)).hit_tokens == 0
    pair.evict_all()
    for length in LENGTHS:
        again = pair.ask_right(document(length, length))
        assert again.hit_tokens == last_boundary(length)
        assert on_host(again) > 0 or length <= BLOCK
    assert pair.is_at_rest()


@families
@pytest.mark.parametrize(("mode", "forgets"), [("lazy", True), ("eager", False)])
def test_a_third_prompt_finds_where_two_parted(family, mode, forgets):
    pair = Pair(family, mode)
    common = document(1, 41)  # off the boundary at 32, and at 48 nothing is common
    for last in (70, 81, 90):
        pair.ask_right([*common, *document(last, last - len(common))])
        if forgets:
            pair.evict_all()
    pair.evict_all()
    third = pair.ask_right([*common, *document(4, 20)])
    assert third.hit_tokens == on_host(third) == (32 if pair.takes_several_tokens else 0)
    assert pair.is_at_rest()


@families
def test_a_device_that_forgets_finds_everything_on_the_host(family):
    pair = Pair(family)
    for length in (48, 100):
        pair.ask_right(document(length, length))
    pair.evict_all()
    for length in (48, 100):
        pair.cache.forget_device()
        assert on_host(pair.ask_right(document(length, length))) == last_boundary(length)
    assert pair.is_at_rest()


@families
def test_a_prompt_that_begins_another(family):
    pair = Pair(family)
    whole = document(3, 100)
    for length in (100, 50, 100, 64, 17, 65, 100):
        pair.ask_right(whole[:length])
        again = pair.ask_right(whole[:length], 1)
        assert again.hit_tokens == last_boundary(length) or not pair.takes_several_tokens
        pair.evict_all()
    assert pair.is_at_rest()


# Controls

# Every document of a control comes back up to token 80, an odd boundary: where chunks of 32 are attended to, they
# need a checkpoint there.
BOUNDARY = 80
FOUR = [(300 + seed, BOUNDARY + 1 + seed) for seed in range(4)]


class Switch(MeddlingCopier):
    """Stores as it is, and loads as `loading` does, which may be exchanged."""

    def __init__(self, copier, tensors) -> None:
        super().__init__(copier)
        self.tensors = tensors
        self.stored = defaultdict(list)  # host blocks of each piece, by group
        self.loading = copier

    def copy(self, direction, copies):
        if direction is Direction.LOAD:
            return self.loading.copy(direction, copies)
        for copy in copies:
            self.stored[copy.group].append(copy.host_blocks)
        return super().copy(direction, copies)


class StaleCopier(MeddlingCopier):
    """Loads of one group bring the piece that was stored last but one: of a state, that of another boundary."""

    def __init__(self, copier, group, stored) -> None:
        super().__init__(copier)
        self.group, self.stored = group, stored
        self.corrupted = 0

    def copy(self, direction, copies):
        return self.copier.copy(direction, [self._stale(copy) for copy in copies])

    def _stale(self, copy):
        if copy.group != self.group:
            return copy
        self.corrupted += 1
        at = self.stored.index(copy.host_blocks)
        return GroupCopy(copy.group, self.stored[at - 1], copy.device_blocks)


def damages(planner, switch):
    """A copier for each way in which a piece of this model can be wrong, by its name."""
    for at, piece in enumerate(planner.pieces):
        group, width = piece.group, piece.device_blocks

        def zeroes(blocks, at=at):
            return CorruptingCopier(switch.copier, switch.tensors, at, loads=None, blocks=blocks)

        yield f"{group.name}: the last piece", zeroes(slice(-width, None))
        if group.is_prefix:
            yield f"{group.name}: the first piece", zeroes(slice(width))
        if isinstance(group, WindowGroup):
            yield f"{group.name}: its oldest piece, a window that is too short", zeroes(slice(width))
        if group.is_state:
            yield f"{group.name}: another boundary's", StaleCopier(switch.copier, at, switch.stored[at])


@families
def test_control_a_wrong_piece_from_the_host_shows_in_the_logits(family):
    switches = []

    def wrap(*given):
        switches.append(Switch(*given))
        return switches[0]

    pair = Pair(family, "eager", wrap_copier=wrap)
    (switch,) = switches
    for seed, length in FOUR:
        pair.ask_right(document(seed, length)[: BOUNDARY - 1], 1)  # the boundary before
        pair.ask_right(document(seed, length), 1)
    for name, damaging in damages(pair.cache.planner, switch):
        pair.evict_all()
        switch.loading, shown = damaging, 0
        for number, (seed, length) in enumerate(FOUR):
            past, off, _ = pair.ask(document(seed, length), 1)
            assert on_host(past) == BOUNDARY
            assert damaging.corrupted == number + 1
            shown += off > pair.tolerance
        assert shown >= SEEN, name
        switch.loading = switch.copier


@families
def test_control_a_wrong_piece_on_the_device_shows_in_the_logits(family):
    pair = Pair(family)
    planner, pool = pair.cache.planner, pair.cache._pool
    for at, piece in enumerate(planner.pieces):
        shown = 0
        for seed, length in FOUR:
            ids = document(seed, length)
            pair.ask_right(ids, 1)
            assert pair.ask_right(ids, 1).device_hit_tokens == BOUNDARY
            key = ChainHasher(BLOCK).keys(ids)[BOUNDARY // BLOCK - 1]
            if piece.in_chunk:
                blocks = [pool.find(key)]
            else:
                places = planner.checkpoint(BOUNDARY // BLOCK)
                pieces = pool.checkpoints.pieces(pool.find(checkpoint_key(key)))
                blocks = list([each for place, each in zip(places, pieces, strict=True) if place.group == at][-1])
            pair.cache._kv.region[blocks] = 0
            shown += pair.ask(ids, 1)[1] > pair.tolerance
            pair.cache.reset()
        assert shown >= SEEN, piece.group.name
