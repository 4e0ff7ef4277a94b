"""The law that what was stored whole is found again, which a cache that only never lies could break unseen.

A prompt is served once, and leaves the device. Then the host must find of it, up to the grid, all that a later prompt
may resume from:

    the same prompt       every chunk before its last token
    its next turn         the same
    the third sibling     every chunk of the prefix that two prompts had in common

as far as what groups look ahead to is there, too (rule 6). So nothing is stored that can never be hit. Bytes are not
copied here.
"""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_prefix_cache import Hit, Pending
from cpu_prefix_cache.deciding import (
    ChunkLocalGroup,
    CPUPrefixCache,
    Direction,
    EngineSteps,
    HybridChunkPlanner,
    KVCacheCoordinator,
    PooledDevice,
    PrefixGroup,
    RankReport,
    Request,
    StateGroup,
    TieredCache,
    WindowGroup,
)
from cpu_prefix_cache.messages.tier import TierOptions, TierReport
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import new_pool
from property_tests.models.engines import cache_options
from property_tests.models.tier_model import RankSlots
from property_tests.strategies import chain

GRID = 4
FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=4096)
LATENT = replace(FULL, name="latent", replicated=True)
WINDOW = WindowGroup(name="window", block_tokens=2, block_bytes=4096, window_tokens=2 * GRID + 1)
LOCAL = ChunkLocalGroup(name="local", block_tokens=GRID, block_bytes=4096, window_tokens=3 * GRID)
STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=4096)
LAYOUTS = {
    "full": [FULL],
    "latent": [LATENT],
    "full, window": [FULL, WINDOW],
    "full, chunk-local": [FULL, LOCAL],
    "full, state": [FULL, STATE],
    "full, latent, window, chunk-local, state": [FULL, LATENT, WINDOW, LOCAL, STATE],
}
LONGEST = 9  # chunks of a prompt and its answer
PORTION = 100


@dataclass(frozen=True)
class Setting:
    layout: str
    ahead: int = 0  # tokens that prefix groups look ahead
    mode: str = "eager"
    interval: int | None = None  # chunks between checkpoints
    late: int = 0  # steps after which the engine learns the tokens that a step computed
    step_chunks: int = 1
    has_tier: bool = False

    @property
    def planner(self) -> HybridChunkPlanner:
        groups = [
            replace(group, lookahead_tokens=self.ahead) if group.is_prefix else group for group in LAYOUTS[self.layout]
        ]
        return HybridChunkPlanner(groups, max_model_len=1_000, in_pages=True)


class Engine:
    """Serves prompts, given as letters, one to a chunk. `tokens` of a prompt may end within a chunk."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.planner = setting, setting.planner
        prompt = LONGEST * self.planner.device_blocks_per_chunk
        prompt += 3 * sum(self.planner.pieces[at.group].device_blocks for at in self.planner.checkpoint(LONGEST))
        self.gpu = new_pool(self.planner, 3 * prompt, on_device=True)
        self.blocks = KVCacheCoordinator(self.planner, self.gpu, on_device=True)
        prompt = LONGEST * self.planner.host_blocks_per_chunk + 3 * self.planner.checkpoint_blocks(LONGEST)
        self.host_blocks = 40 * prompt
        options = dict(
            host_blocks=self.host_blocks,
            offload=setting.mode,
            # A step may put three checkpoints on the device, besides its tokens.
            steps=EngineSteps(max_tokens=setting.step_chunks * GRID, ahead_blocks=self.gpu.capacity // 2),
            checkpoint_interval=setting.interval and setting.interval * GRID,
        )
        device = PooledDevice(self.gpu)
        self.tier = RankSlots(self.planner) if setting.has_tier else None
        if self.tier is None:
            self.cache = CPUPrefixCache(self.planner, device, **cache_options(**options))
        else:
            below = TierOptions(2 * self.host_blocks, "eager")
            self.cache = TieredCache(self.planner, device, below=below, **cache_options(**options))
        self.now = 0.0
        self.served = 0
        self.told: list[tuple[str, int]] = []  # computed by steps, and not reported to the cache yet
        for _ in range(2):
            self.step()

    def serve(self, prompt: str, tokens: int, answer: str = "", answer_tokens: int = 0) -> None:
        self.served += 1
        id, keys = f"r{self.served}", chain(prompt + answer)
        n0 = self.blocks.longest_boundary(keys, 0, tokens)
        boundary = self.found(prompt, tokens, n0)
        request = Request(id, keys, tokens)
        self.cache.admit(request, n0, boundary if boundary > n0 else None, self.now)
        pins = [self.put(keys, depth) for depth in range(1, boundary // GRID + 1)]  # as if it had been loaded
        end = boundary
        while end < tokens + answer_tokens:
            step = self.setting.step_chunks * GRID if end < tokens else 1
            stops = [stop for stop in (*self.cache.boundaries(id), tokens) if stop > end]
            end = min([end + step, tokens + answer_tokens, *stops])
            pins += [self.put(keys, depth) for depth in range(len(pins) + 1, end // GRID + 1)]
            self.keep(keys, end, [boundary, *self.cache.boundaries(id)])
            self.told.append((id, end))
            self.step()
        if end % GRID == 0:
            self.put_checkpoint(keys, end // GRID)
        self.hear(0)
        self.cache.finished(id, end)
        for pin in pins:
            self.gpu.unpin(pin)
        self.rest()

    def found(self, prompt: str, tokens: int, n0: int = 0) -> int:
        """Up to which token the host can bring the prompt, once it has waited for what is on its way."""
        for _ in range(100):
            answer = self.cache.lookup(Request(f"asks after {self.served}", chain(prompt), tokens), n0, self.now)
            if not isinstance(answer, Pending):
                return answer.boundary if isinstance(answer, Hit) else n0
            self.step()
        raise AssertionError("the answer is Pending for ever")

    def device_forgets(self) -> None:
        """By serving others, since lazy stores what is about to leave."""
        for at in range(20):
            self.serve(f"{'zyxwv'[at % 5]}{'ABCDEFGHIJKLMNOPQRST'[at]}" * (LONGEST // 2), LONGEST // 2 * 2 * GRID)
            if not any(self.gpu.find(name.encode()) is not None for name in "abcdefgh"):
                return
        raise AssertionError("the device forgets nothing")

    def host_forgets(self) -> None:
        self.cache.flush()
        self.rest()
        pool = self.cache.pool
        pool.abort(pool.take(pool.capacity))

    # the device: chunks, and checkpoints below the chunks that must be there to resume from them

    def put(self, keys: list[bytes], depth: int) -> object:
        node = self.gpu.find(keys[depth - 1])
        if node is None:
            parent = self.gpu.root if depth == 1 else self.gpu.find(keys[depth - 2])
            [node] = self.gpu.allocate(1, [keys[depth - 1]])
            self.gpu.commit([node], [keys[depth - 1]], parent, self.gpu.touch(None))
        return self.gpu.pin(node)

    def keep(self, keys: list[bytes], end: int, boundaries: list[int]) -> None:
        for b in boundaries:
            depth = (b + -(-self.setting.ahead // GRID) * GRID) // GRID
            if b and depth <= end // GRID:
                self.put_checkpoint(keys, depth)

    def put_checkpoint(self, keys: list[bytes], depth: int) -> None:
        if not self.planner.needs_checkpoint(depth) or self.gpu.find(checkpoint_key(keys[depth - 1])) is not None:
            return
        needs = self.blocks.needs(self.blocks.checkpoint_at(keys, depth))
        [node] = self.gpu.allocate(0, [checkpoint_key(keys[depth - 1])], needs)
        self.gpu.commit([node], [checkpoint_key(keys[depth - 1])], self.gpu.find(keys[depth - 1]), self.gpu.touch(None))

    # steps

    def step(self) -> None:
        self.now += 0.01
        self.hear(self.setting.late)
        plan = self.cache.step()
        self.cache.report(RankReport(0, frozenset(transfer.id for transfer in plan.transfers)))
        if self.tier is not None:
            self.step_below(self.cache, self.tier)

    def step_below(self, cache: TieredCache, tier: RankSlots) -> None:
        plan = cache.plan_below()
        tier.advance(plan)
        tier.taken = max(tier.taken, plan.taken)
        for transfer in plan.step.transfers:
            for copy in transfer.copies if transfer.direction is Direction.STORE else ():
                for slot, label in zip(copy.host_blocks, copy.labels, strict=True):
                    tier.write(slot, label, label.key)
        done = frozenset(transfer.id for transfer in plan.step.transfers)
        cache.report_below(TierReport(RankReport(0, done), tier.next_generation, *tier.portion()))

    def hear(self, late: int) -> None:
        while len(self.told) > late:
            self.cache.computed(*self.told.pop(0))

    def rest(self) -> None:
        for _ in range(100):
            self.step()
            if not self.cache.has_transfers and self.setting.mode == "eager":
                break
            if not self.cache.has_transfers and not self.told:
                break
        self.cache.check_valid()


def resumed(setting: Setting, tokens: int) -> int:
    """Up to which token the first `tokens` tokens, if all are there, let a prompt resume."""
    whole = tokens // GRID * GRID
    return max(b for b in range(0, whole + 1, GRID) if b == 0 or b + setting.ahead <= whole)


SETTINGS = st.builds(
    Setting,
    layout=st.sampled_from(sorted(LAYOUTS)),
    ahead=st.sampled_from([0, 1, GRID, 2 * GRID]),
    mode=st.sampled_from(["lazy", "eager"]),
    interval=st.sampled_from([None, None, 1, 2]),
    late=st.sampled_from([0, 1]),
    step_chunks=st.sampled_from([1, 2, 100]),
    has_tier=st.booleans(),
)


@settings(max_examples=150)
@given(
    setting=SETTINGS,
    chunks=st.integers(1, 6),
    part=st.integers(0, GRID - 1),
    answer=st.integers(0, 2 * GRID),
    asked=st.sampled_from(["the same", "another last token", "its next turn"]),
)
def test_a_prompt_that_was_served_once_is_found_again(
    setting: Setting, chunks: int, part: int, answer: int, asked: str
) -> None:
    engine = Engine(setting)
    prompt, tokens = "abcdefgh"[:chunks], chunks * GRID + part
    engine.serve(prompt, tokens, "mno", answer)
    engine.device_forgets()
    if setting.has_tier:
        engine.host_forgets()
    expected = min(resumed(setting, tokens), (tokens - 1) // GRID * GRID)
    if asked == "the same":
        assert engine.found(prompt, tokens) == expected
    elif asked == "another last token":
        assert engine.found(prompt if part else prompt[:-1] + "w", tokens) == resumed(setting, tokens - 1)
    else:
        assert engine.found(prompt + "mqrs", (chunks + 4) * GRID) >= expected


@settings(max_examples=100)
@given(setting=SETTINGS, chunks=st.integers(1, 4), ends=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_the_prefix_of_two_prompts_is_found_by_a_third(setting: Setting, chunks: int, ends: tuple[int, int]) -> None:
    engine = Engine(setting)
    prefix = "abcdefgh"[:chunks]
    for letters, end in zip(("mno", "qrs"), ends, strict=True):
        engine.serve(prefix + letters[:end], (chunks + end) * GRID + 1)
    engine.device_forgets()
    if setting.has_tier:
        engine.host_forgets()
    assert engine.found(prefix + "tuv", (chunks + 3) * GRID) >= resumed(setting, chunks * GRID)
