"""Rule 6 over groups of every kind, as a sentence about tokens.

    b is the largest boundary up to the last token but one at which every group finds each token it needs to go on.

Needs of a group are listed here token by token, for each of its layers' next query, and not block by block as in the
planner. The pool is filled through its own calls, with pieces under the keys the coordinator gives them; the oracle
knows its contents from the names it put there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import (
    ChunkLocalGroup,
    Group,
    HybridChunkPlanner,
    KVCacheCoordinator,
    PrefixGroup,
    StateGroup,
    WindowGroup,
)
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import new_pool
from property_tests.strategies import chain, prompts

GRID = 8
KINDS = ["prefix", "window", "chunk-local", "state"]


@dataclass(frozen=True)
class Layer:
    """A group as the oracle sees it."""

    kind: str
    block: int
    window: int
    ahead: int
    extra: int

    def needed_tokens(self, b: int) -> set[int]:
        """The tokens whose KV the query at token b (and `extra` tokens before it, drafts) reads."""
        if self.kind == "prefix":
            return set(range(b + self.ahead))
        if self.kind == "window":
            return {seen for query in range(b - self.extra, b + 1) for seen in range(query - self.window + 1, b)} & set(
                range(b)
            )
        if self.kind == "chunk-local":
            return {token for token in range(b) if token // self.window == b // self.window}
        return {b - 1} - {-1} if self.kind == "state" else set()


layers = st.builds(
    Layer,
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([1, 2, 4, 8]),
    window=st.integers(1, 30),
    ahead=st.sampled_from([0, 0, 0, 1, 7, 8, 9, 20]),
    extra=st.sampled_from([0, 0, 1, 5]),
)


def group(layer: Layer, name: str) -> Group:
    same = {"name": name, "block_tokens": layer.block, "block_bytes": 100}
    match layer.kind:
        case "prefix":
            return PrefixGroup(lookahead_tokens=layer.ahead, **same)
        case "window":
            return WindowGroup(window_tokens=layer.window, extra_tokens=layer.extra, **same)
        case "chunk-local":
            return ChunkLocalGroup(window_tokens=layer.window, **same)
    return StateGroup(**same)


class Host:
    """A coordinator over a pool, and the names of what was put there."""

    def __init__(self, model: Sequence[Layer], forest: Sequence[str], boundaries: Sequence[str]) -> None:
        self.planner = HybridChunkPlanner(
            [group(layer, str(at)) for at, layer in enumerate(model)], max_model_len=1_000, grid_tokens=GRID
        )
        pool = new_pool(self.planner, 4_096)
        self.coordinator = KVCacheCoordinator(self.planner, pool)
        self.chunks = {prompt[:end] for prompt in forest for end in range(1, len(prompt) + 1)}
        self.kept: set[str] = set()
        for name in sorted(self.chunks, key=len):
            parent = pool.find(name[:-1].encode()) if len(name) > 1 else pool.root
            pool.commit(pool.allocate(1), [name.encode()], parent, pool.touch(None))
        for name in boundaries:
            if name in self.chunks and name not in self.kept and self.planner.needs_checkpoint(len(name)):
                needs = self.coordinator.needs(self.coordinator.checkpoint_at(chain(name), len(name)))
                [node] = pool.allocate(0, needs=needs)
                pool.commit([node], [checkpoint_key(name.encode())], pool.find(name.encode()), pool.touch(None))
                self.kept.add(name)
        pool.check_valid()


def whole(model: Sequence[Layer], b: int) -> int:
    """Up to which token chunks must be there to resume at b: a chunk ahead counts when it is whole."""
    ahead = max((layer.ahead for layer in model if layer.kind == "prefix"), default=0)
    return -(-(b + ahead) // GRID) * GRID


def has_tokens(model: Sequence[Layer], layer: Layer, host: Host, prompt: str, n0: int, b: int) -> bool:
    """Whether the host has, of what this group needs to go on at b, all that does not lie before n0.

    A prefix group's tokens are in chunks; those of the others in the checkpoint below these and nowhere else (rule 9).
    """
    needed = layer.needed_tokens(b)
    if layer.kind == "prefix":
        return all(
            prompt[: token // GRID + 1] in host.chunks and token // GRID < len(prompt) for token in needed - before(n0)
        )
    return not needed or prompt[: whole(model, b) // GRID] in host.kept


def before(n0: int) -> set[int]:
    return set(range(n0))


def slow_boundary(model: Sequence[Layer], host: Host, prompt: str, n0: int, num_tokens: int) -> int:
    last = num_tokens - 1
    able = [n0]
    for b in range(n0 + 1, last + 1):
        on_grid = b % GRID == 0 and b <= len(prompt) * GRID
        chunks = all(prompt[:end] in host.chunks for end in range(n0 // GRID + 1, b // GRID + 1))
        is_within = whole(model, b) <= num_tokens
        if on_grid and chunks and is_within and all(has_tokens(model, each, host, prompt, n0, b) for each in model):
            able.append(b)
    return max(able)


@settings(max_examples=400)
@given(
    model=st.lists(layers, min_size=1, max_size=4),
    forest=st.lists(prompts, max_size=6),
    boundaries=st.lists(prompts, max_size=12),
    prompt=prompts,
    depth=st.integers(0, 6),
    off=st.sampled_from([0, 0, 0, 0, 3]),
    num_tokens=st.integers(0, 60),
)
def test_every_group_can_resume_there_and_nowhere_later(
    model: list[Layer],
    forest: list[str],
    boundaries: list[str],
    prompt: str,
    depth: int,
    off: int,
    num_tokens: int,
) -> None:
    """O8.12, S7.30: the intersection of what the groups allow."""
    assume(any(layer.kind != "none" for layer in model))
    host = Host(model, [*forest, prompt[:depth]], [*boundaries, *(prompt[:end] for end in range(1, len(boundaries)))])
    run = next((at for at in range(len(prompt)) if prompt[: at + 1] not in host.chunks), len(prompt))
    n0 = min(depth, run) // 2 * GRID + off
    found = host.coordinator.longest_boundary(chain(prompt), n0, num_tokens)
    assert found == slow_boundary(model, host, prompt, n0, num_tokens)
    if found > n0:
        assert host.coordinator.resume_node(chain(prompt), found // GRID) is not None


@given(layer=layers, chunks=st.integers(1, 12))
def test_the_blocks_of_a_checkpoint_cover_the_tokens_it_is_for_and_no_block_is_for_nothing(
    layer: Layer, chunks: int
) -> None:
    assume(layer.kind in ("window", "chunk-local", "state"))
    planner = HybridChunkPlanner([group(layer, "it")], max_model_len=1_000, grid_tokens=GRID)
    pieces = planner.checkpoint(chunks)
    blocks = [at.chunk * GRID // layer.block + at.block for at in pieces]  # without a prefix group none looks ahead
    assert set(blocks) == {token // layer.block for token in layer.needed_tokens(chunks * GRID)}
    assert blocks == sorted(blocks) and planner.needs_checkpoint(chunks) == bool(blocks)
