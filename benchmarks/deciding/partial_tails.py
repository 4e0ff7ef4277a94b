"""How many more tokens could hit if states were also kept where prompts end within a block, at most.

    python -m benchmarks.deciding.partial_tails TRACE [--blocks 512,1024,6144] [--unit 32]

Without these, a prompt resumes at the last block of an earlier one with which it begins, or where two earlier ones
part. With them also at the last `unit` of an earlier one. From a trace in Mooncake's format it is known which blocks of
512 tokens prompts have in common, and not whether what follows the last of them is the same: it is taken to be. Nothing
is evicted.

    an earlier prompt     |-------|-------|--          1,100 tokens
    a prompt              |-------|-------|-----|      1,300, the first two blocks the same
    resumes at                            ^            1,024, with blocks of 512 and of 1,024
                                            ^          1,088, with tails in units of 32
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.tools.replay.trace_guesses import MOONCAKE_BLOCK_TOKENS
from cpu_prefix_cache.tools.replay.traces import TraceRequest, read_traces


class Found(NamedTuple):
    """Prompt tokens, those of them that hit at blocks, and those that hit with tails."""

    tokens: int
    at_blocks: int
    with_tails: int

    @property
    def more(self) -> float:
        """The tokens that tails add, for each that hits at blocks."""
        return self.with_tails / self.at_blocks - 1


def found(prompts: Sequence[TraceRequest], block: int, unit: int) -> Found:
    """With blocks of so many tokens, a multiple of those of the trace."""
    seen = set[bytes]()  # the last keys of beginnings that were computed
    kept: dict[bytes, int] = {}  # by the key of a beginning: where it can be resumed, at a block
    tails = defaultdict[bytes, set[int]](set)  # by the last whole key of prompts: their last units
    tokens = at_blocks = with_tails = 0
    for prompt in prompts:
        last = prompt.tokens - 1
        keys = prompt.keys[: last // MOONCAKE_BLOCK_TOKENS]
        common = next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        resumed = max((kept.get(key, 0) for key in keys[:common]), default=0)
        behind = (tail for key in keys[:common] for tail in tails.get(key, ()) if tail <= last)
        tokens += prompt.tokens
        at_blocks += resumed
        with_tails += max([resumed, *behind])
        seen.update(keys)
        for end in (common, len(keys)):
            if boundary := end * MOONCAKE_BLOCK_TOKENS // block * block:
                kept[keys[boundary // MOONCAKE_BLOCK_TOKENS - 1]] = boundary
        if keys:
            tails[keys[-1]].add(last // unit * unit)
    return Found(tokens, at_blocks, with_tails)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace in Mooncake's format, plain or .gz")
    parser.add_argument("--blocks", default="512,1024,6144", help="tokens of a block (default 512,1024,6144)")
    parser.add_argument("--unit", type=int, default=32, help="tokens between the ends of tails (default 32)")
    options = parser.parse_args()
    prompts = read_traces([str(options.trace)]).requests
    print(f"{options.trace.name}: {len(prompts):,} prompts; tails in units of {options.unit} tokens")
    print("| tokens of a block | hit of all tokens | with tails, at most | more of those that hit |")
    print("|--:|--:|--:|--:|")
    for block in map(int, options.blocks.split(",")):
        those = found(prompts, block, options.unit)
        shares = those.at_blocks / those.tokens, those.with_tails / those.tokens
        print(f"| {block:,} | {shares[0]:.4f} | {shares[1]:.4f} | {those.more:.1%} |")


if __name__ == "__main__":
    main()
