"""The line that the first rank of an engine logs at start: how much the host cache holds, and how it works.

the host cache has 48.0 GiB, 24,576 blocks: 393,216 tokens in prompts of 8,192; lazy, adaptive, no tier; emptied with
the device; staged copies (...)
"""

from connector.vllm.resets import RESETS
from connector.vllm.settings import Settings
from cpu_prefix_cache.copying import ChosenCopier
from cpu_prefix_cache.deciding import RAW, conversation_bytes


def start_line(settings: Settings, max_model_len: int, choice: ChosenCopier) -> str:
    """Tokens are those of prompts as long as they may be, each with the checkpoint at its end."""
    planner, options = settings.planner, settings.options
    longest = planner.full_chunks(max_model_len) * planner.grid_tokens
    tokens = settings.host_bytes * longest // conversation_bytes(planner, longest)
    size = _gib(settings.host_bytes * settings.regions)
    ahead = planner.lookahead_chunks * planner.grid_tokens
    drafter = f"; the drafter takes the last {ahead} tokens of each hit" if ahead else ""
    coded = "".join(f"{each.name} by codec {each.codec}, " for each in planner.groups if each.codec != RAW)
    below = settings.tier or settings.pool or "no tier"
    return (
        f"the host cache has {size}, {settings.host_blocks:,} blocks: {tokens:,} tokens in prompts of {longest:,}; "
        f"{options.get('offload', 'lazy')}, {options['policy']}, {coded}"
        f"{below}; {RESETS[settings.reset]}; {choice.name} copies ({choice.reason}){drafter}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
