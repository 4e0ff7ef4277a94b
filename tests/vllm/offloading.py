"""vLLM's own CPU offloading manager with a policy, and requests whose keys it gets as from vLLM's scheduler."""

from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from connector.vllm_offloading.policy import PrefixPolicy

OURS = "cpu_prefix_cache_vllm"
BLOCK = 16
ADAPTIVE, ARC, LRU = "AdaptivePolicy", "ArcPolicy", "LruPolicy"
POLICIES = (ADAPTIVE, ARC, LRU)


def managed(chunks: int, policy: str = LRU, **options: object) -> CPUOffloadingManager:
    return CPUOffloadingManager(chunks, policy, OURS if policy in POLICIES else None, **options)


def policy_of(manager: CPUOffloadingManager) -> PrefixPolicy:
    return manager._policy


@dataclass
class Prompt:
    """A request of the manager. Its text names its chunks: "abcd" has four, and shares two with "abxy".

    With several groups the chunks of each group are as many.
    """

    manager: CPUOffloadingManager
    text: str
    groups: int = 1
    context: ReqContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = ReqContext(self.text)
        for group in range(self.groups):
            for end in range(1, len(self.text) + 1):
                self.context.set_offload_key_position(key(self.text[:end], group), BLOCK * end)
        self.manager.on_new_request(self.context)

    def chunks(self, start: int = 0, stop: int | None = None) -> list[OffloadKey]:
        ends = range(start + 1, (len(self.text) if stop is None else stop) + 1)
        return [key(self.text[:end], group) for group in range(self.groups) for end in ends]

    @property
    def hit(self) -> int:
        """How many chunks a lookup finds, from the first one on."""
        found = [self.manager.lookup(each, self.context) is LookupResult.HIT for each in self.chunks()]
        return found.index(False) if False in found else len(found)

    def load(self, stop: int) -> None:
        keys = self.chunks(0, stop)
        self.manager.prepare_load(keys, self.context)
        self.manager.complete_load(keys, self.context)

    def store(self, start: int = 0, stop: int | None = None) -> str | None:
        """Store these chunks, and end it. The last letters of what left for them; None where there was no room."""
        stored = self.manager.prepare_store(self.chunks(start, stop), self.context)
        if stored is None:
            return None
        self.manager.complete_store(stored.keys_to_store, self.context)
        return "".join(letter(each) for each in stored.evicted_keys)

    def end(self) -> None:
        self.manager.on_request_finished(self.context)


def key(prefix: str, group: int = 0) -> OffloadKey:
    """As vLLM's: a digest, and the number of the group."""
    return make_offload_key(prefix.encode().rjust(32, b"\0")[::-1], group)


def letter(key: OffloadKey) -> str:
    return chr(key[0])


def serve(manager: CPUOffloadingManager, text: str) -> str | None:
    """One request from beginning to end, and what left for it."""
    prompt = Prompt(manager, text)
    hit = prompt.hit
    if hit:
        prompt.load(hit)
    left = prompt.store(hit) if hit < len(text) else ""
    prompt.end()
    return left
