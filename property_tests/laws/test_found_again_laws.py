"""The law that what was stored whole is found again, which a cache that only never lies could break unseen.

A prompt is served once, and leaves the device. Then the host must find of it, up to the grid, all that a later prompt
may resume from:

    the same prompt       every chunk before its last token
    its next turn         the same
    the third sibling     every chunk of the prefix that two prompts had in common

as far as what groups look ahead to is there, too (rule 6). So nothing is stored that can never be hit.
"""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpu_prefix_cache import Hit, Pending
from cpu_prefix_cache.deciding import (
    ChunkLocalGroup,
    EngineSteps,
    HybridChunkPlanner,
    PrefixGroup,
    Request,
    StateGroup,
    WindowGroup,
)
from cpu_prefix_cache.testing import Engine
from property_tests.strategies import chain
from tests.unit.tiers.small_tier import Tiered

GRID = 4
FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=4096)
LATENT = replace(FULL, name="latent", lanes=1)
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


class Story:
    """Serves prompts, given as letters, one to a chunk. `tokens` of a prompt may end within a chunk."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.planner = setting, setting.planner
        prompt = LONGEST * self.planner.device_blocks_per_chunk
        prompt += 3 * sum(self.planner.pieces[at.group].device_blocks for at in self.planner.checkpoint(LONGEST))
        host = 40 * (LONGEST * self.planner.host_blocks_per_chunk + 3 * self.planner.checkpoint_blocks(LONGEST))
        options = dict(
            device=3 * prompt,
            host=host,
            # A step may put three checkpoints on the device, besides its tokens.
            steps=EngineSteps(max_tokens=setting.step_chunks * GRID, ahead_blocks=3 * prompt // 2),
            checkpoint_interval=setting.interval and setting.interval * GRID,
        )
        self.engine: Any
        if setting.has_tier:
            self.engine = Tiered(*self.planner.groups, mode=setting.mode, slots=2 * host, **options)
        else:
            self.engine = Engine(setting.mode, planner=self.planner, **options)
        self.engine.checks = False  # but at rest
        self.gpu, self.cache = self.engine.gpu, self.engine.cache
        self.served = 0
        self.told: list[tuple[str, int]] = []  # computed by steps, and not reported to the cache yet
        for _ in range(2):
            self.step()

    def serve(self, prompt: str, tokens: int, answer: str = "", answer_tokens: int = 0) -> None:
        self.served += 1
        id, keys = f"r{self.served}", chain(prompt + answer)
        end = self.found(prompt, tokens, self.engine.device.coordinator.longest_boundary(keys, 0, tokens))
        if self.engine.starts(id, prompt + answer, extra=tokens - len(keys) * GRID, chunks=end // GRID) is not None:
            self.step()
        self.engine.fills(id, end // GRID)
        self.keep(keys, end, [end])
        while end < tokens + answer_tokens:
            step = self.setting.step_chunks * GRID if end < tokens else 1
            stops = [stop for stop in (*self.cache.boundaries(id), tokens) if stop > end]
            end = min([end + step, tokens + answer_tokens, *stops])
            self.engine.fills(id, end // GRID)
            self.keep(keys, end, self.cache.boundaries(id))
            self.told.append((id, end))
            self.step()
        if end % GRID == 0:
            self.engine.keeps(keys, end // GRID)
        self.hear(0)
        self.cache.finished(id, end)
        self.engine.leaves(id)
        self.rest()

    def found(self, prompt: str, tokens: int, n0: int = 0) -> int:
        """Up to which token the host can bring the prompt, once it has waited for what is on its way."""
        for _ in range(100):
            request = Request(f"asks after {self.served}", chain(prompt), tokens)
            answer = self.cache.lookup(request, n0, self.engine.now)
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
        self.cache.below.flush()
        self.rest()
        pool = self.cache.pool
        pool.abort(pool.take(pool.capacity))

    def keep(self, keys: list[bytes], end: int, boundaries: list[int]) -> None:
        """Checkpoints hang below the chunks that must be there to resume from them."""
        for b in boundaries:
            depth = (b + -(-self.setting.ahead // GRID) * GRID) // GRID
            if b and depth <= end // GRID:
                self.engine.keeps(keys, depth)

    def step(self) -> None:
        self.engine.now += 0.01
        self.hear(self.setting.late)
        self.engine.copies()
        if self.setting.has_tier:
            self.engine.plans_below()
            self.engine.tier_ends()

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
# of the chunks that reach the host together the deepest is no use without a checkpoint, and the one above is
@example(Setting("full, chunk-local", step_chunks=2, has_tier=True), 4, 0, 1, "the same")
def test_a_prompt_that_was_served_once_is_found_again(
    setting: Setting, chunks: int, part: int, answer: int, asked: str
) -> None:
    story = Story(setting)
    prompt, tokens = "abcdefgh"[:chunks], chunks * GRID + part
    story.serve(prompt, tokens, "mno", answer)
    story.device_forgets()
    if setting.has_tier:
        story.host_forgets()
    expected = min(resumed(setting, tokens), (tokens - 1) // GRID * GRID)
    if asked == "the same":
        assert story.found(prompt, tokens) == expected
    elif asked == "another last token":
        assert story.found(prompt if part else prompt[:-1] + "w", tokens) == resumed(setting, tokens - 1)
    else:
        assert story.found(prompt + "mqrs", (chunks + 4) * GRID) >= expected


@settings(max_examples=100)
@given(setting=SETTINGS, chunks=st.integers(1, 4), ends=st.tuples(st.integers(1, 3), st.integers(1, 3)))
@example(Setting("full", ahead=1, mode="lazy", step_chunks=100), 4, (1, 1))  # a block without a key comes back first
def test_the_prefix_of_two_prompts_is_found_by_a_third(setting: Setting, chunks: int, ends: tuple[int, int]) -> None:
    story = Story(setting)
    prefix = "abcdefgh"[:chunks]
    for letters, end in zip(("mno", "qrs"), ends, strict=True):
        story.serve(prefix + letters[:end], (chunks + end) * GRID + 1)
    story.device_forgets()
    if setting.has_tier:
        story.host_forgets()
    assert story.found(prefix + "tuv", (chunks + 3) * GRID) >= resumed(setting, chunks * GRID)
