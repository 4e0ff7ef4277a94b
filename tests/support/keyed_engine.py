"""An engine that names its blocks by keys, with attention, a window and a state; the bytes of a block follow from its
key, so that every block that was loaded can be compared.
"""

import hashlib
from collections.abc import Sequence

import torch

from cpu_prefix_cache import HostOptions, Prefix, State, Window, keys_and_values, states
from cpu_prefix_cache.by_keys import KeyedHostCache
from cpu_prefix_cache.tier import Tier

BLOCKS, TOKENS, WINDOW = 24, 4, 8
GROUPS = ("attention", "window", "state")
POISON = 0xDD


def keys(*names: object) -> list[bytes]:
    """Chained digests: equal beginnings have equal keys."""
    digests, above = list[bytes](), b""
    for name in names:
        above = hashlib.sha256(above + str(name).encode()).digest()
        digests.append(above)
    return digests


class KeyedEngine:
    """`groups` are some of GROUPS; `host_blocks` is the size of the host, in blocks of attention. The rest are options
    of the host cache."""

    def __init__(
        self,
        groups: Sequence[str] = GROUPS,
        host_blocks: int = 200,
        *,
        codec: str = "none",
        device: str = "cpu",
        null_block: int | None = None,
        below: Tier | None = None,
        **options: object,
    ) -> None:
        kv = torch.zeros(2, 3, BLOCKS, TOKENS, 8, 32, dtype=torch.bfloat16, device=device)
        window = torch.zeros(2, 3, BLOCKS, TOKENS, 8, 32, dtype=torch.bfloat16, device=device)
        state = torch.zeros(BLOCKS, 50, device=device)
        layouts = {
            "attention": lambda: Prefix(keys_and_values(kv, block_dim=2), block_tokens=TOKENS, codec=codec),
            "window": lambda: Window(
                keys_and_values(window, block_dim=2), block_tokens=TOKENS, window_tokens=WINDOW, codec=codec
            ),
            "state": lambda: State(states(state), block_tokens=TOKENS),
        }
        self.groups = [layouts[name]() for name in groups]
        size = host_blocks * self.groups[0].group.block_bytes
        self.host = KeyedHostCache(
            self.groups, host_bytes=size, null_block=null_block, below=below, options=HostOptions(**options)
        )

    def bytes_of(self, key: bytes, group: int) -> list[torch.Tensor]:
        """The bytes that a block of this key has in each part of a group: those of bf16 numbers near one."""
        draw = torch.Generator().manual_seed(int.from_bytes(key[:6]) + group)
        return [
            torch.randn(part.rows.shape[1] // 2, generator=draw).bfloat16().view(torch.uint8)
            for part in self.groups[group].parts
        ]

    def compute(self, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> None:
        """Write what the last of these keys have."""
        for group, each in enumerate(blocks):
            for key, block in zip(keys[len(keys) - len(each) :], each, strict=True):
                for part, content in zip(self.groups[group].parts, self.bytes_of(key, group), strict=True):
                    part.rows[block] = content

    def poison(self) -> None:
        """Overwrite all blocks."""
        for group in self.groups:
            for part in group.parts:
                part.rows[:] = POISON

    def wrong(self, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """The blocks, with their groups, that do not hold what the last of these keys have."""
        return [
            (self.groups[group].group.name, block)
            for group, each in enumerate(blocks)
            for key, block in zip(keys[len(keys) - len(each) :], each, strict=True)
            for part, content in zip(self.groups[group].parts, self.bytes_of(key, group), strict=True)
            if not torch.equal(part.rows[block].cpu(), content)
        ]

    def put(self, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> None:
        """Compute and put, and lose all of it."""
        self.compute(keys, blocks)
        assert self.host.put(keys, blocks).wait()
        self.poison()

    def loaded(self, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> bool:
        """Whether a load into poisoned blocks went well. Then all of it must be right."""
        self.poison()
        ok = self.host.load(keys, blocks).wait()
        assert not ok or self.wrong(keys, blocks) == []
        return ok
