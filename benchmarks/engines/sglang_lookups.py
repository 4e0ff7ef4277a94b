"""Processor time of one lookup of a prompt that the device has lost and the host has: SGLang's HiCache, and our linker.

    .venv-sglang/bin/python -m benchmarks.engines.sglang_lookups [--tokens 32768] [--page 64] [--pairs 50]

Both are behind SGLang's own tree, on a CPU, and looked up in turn. HiCache keeps host nodes in the tree, so that its
lookup is the match alone. With a linker SGLang matches, hashes all pages that the device lacks, and asks the linker.
What of this is ours is `HostLinker.lookup`; a linker that answers at once would leave the rest. HiCache's copies and
the pinning of its memory are stubbed: they need a GPU.
"""

import argparse
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from types import SimpleNamespace
from typing import Any

from tests.sglang.stubs import install

install()

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402

from benchmarks.common import print_environment  # noqa: E402
from tests.sglang import engine  # noqa: E402
from tests.sglang.models import FULL, Kind  # noqa: E402

REQUEST = SimpleNamespace(rid="a request", session=None)
HOST_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 32768), ("page", 64), ("pairs", 50)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    kind, tokens = Kind((FULL,), page_tokens=given.page), array("q", range(given.tokens))
    with ExitStack() as options:
        hicache = with_hicache(options, kind, tokens)
        linked = with_linker(options, kind, tokens)
        wrapper = linked.linker
        lookup = wrapper.cache_linker.lookup = Timed(wrapper.cache_linker.lookup)
        hashing = wrapper._tail_hashes = Timed(wrapper._tail_hashes)
        timed = [Timed(lambda tree=tree: match(tree, tokens)) for tree in (hicache, linked)]
        for each in (each for _ in range(given.pairs + 1) for each in timed):
            assert each().host_hit_length == given.tokens
    host, whole, hashes, own = (median(each.seconds[1:]) * 1e6 for each in (*timed, hashing, lookup))
    rows = {
        "HiCache": host,
        "linker, all of SGLang's and ours": whole,
        "of it SGLang's hashes of pages": hashes,
        "of it the rest of SGLang's": whole - hashes - own,
        "of it HostLinker.lookup": own,
    }
    print_environment(["cpu-prefix-cache", "sglang", "torch"])
    print(f"| {given.tokens} tokens in pages of {given.page} | us | times HiCache's |\n|---|--:|--:|")
    for name, spent in rows.items():
        print(f"| {name} | {spent:.0f} | {spent / host:.2f} |")


class Timed:
    """A function whose calls are timed, in seconds of this process."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, list[float]()

    def __call__(self, *arguments: Any) -> Any:
        began = time.process_time()
        result = self.call(*arguments)
        self.seconds.append(time.process_time() - began)
        return result


def match(tree: Any, tokens: array) -> Any:
    return tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens), req=REQUEST))


def with_linker(options: ExitStack, kind: Kind, tokens: array) -> Any:
    args = options.enter_context(engine.server_args(host_bytes=HOST_BYTES))
    return filled(engine.Engine(args, kind, tokens=2 * len(tokens)).tree, tokens)


def with_hicache(options: ExitStack, kind: Kind, tokens: array) -> Any:
    common._cuda_host_register = lambda *_, **__: None
    args = options.enter_context(
        get_context().override_server_args(
            device="cpu",
            page_size=kind.page_tokens,
            enable_hierarchical_cache=True,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
        )
    )
    tree = engine.Engine(args, kind, tokens=2 * len(tokens), enable_hierarchical_cache=True).tree
    ended = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    completion = SimpleNamespace(start_event=ended, finish_event=ended, timing_enabled=False)
    tree.cache_controller.l2_transfer_engine.submit_device_to_host = lambda _: completion
    return filled(tree, tokens)


def filled(tree: Any, tokens: array) -> Any:
    """The tree of a device that had these tokens and has given them up, after they came to the host."""
    slots = tree.token_to_kv_pool_allocator.alloc(len(tokens))
    tree.insert(InsertParams(key=RadixKey(tokens), value=slots.to(torch.int64)))
    for _ in range(10):
        tree.check_hicache_events()
    tree.evict(EvictParams(num_tokens=1 << 30))
    return tree


if __name__ == "__main__":
    main()
