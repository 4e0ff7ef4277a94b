"""Thousands of requests through vLLM's own scheduler, with everything going wrong that may.

Each test counts what happened, and fails if one of the things it is about did not happen. VLLM_REQUESTS is how many
requests each variant has.
"""

import os

import pytest

from tests.vllm.engine import LOADING, MAX_MODEL_LEN, PREEMPTED, RUNNING, Engine

REQUESTS = int(os.environ.get("VLLM_REQUESTS", "1000"))
FEW = 20_000  # bytes, some blocks: compute waits for shorter loads, and requests for longer ones
WITH_LITTLE_ROOM = (
    "hit",
    "miss",
    "pending",
    "loads done",
    "loads failed",
    "loads cancelled",
    "stores planned",
    "blocks held",
    "preemptions",
    "aborts while WAITING",
    "aborts while RUNNING",
    "aborts while WAITING_FOR_REMOTE_KVS",
    "aborts while PREEMPTED",
    "resets during a load",
    "resets during a store",
    "resets that preempt",
    "resets that preempt during a store",
    "blocks hidden until computed",
)
EXCHANGES = ("stores in exchange with a load",)
WITH_ROOM = (
    "hit",
    "loads done",
    "loads failed",
    "resets during a store",
    "stores of what compute overwrites",
)
AWAITED = ("loads computed on",)
BESIDE = ("loads beside a step", "stores beside a step")


class Users:
    """People who share system prompts, go on with their conversations, repeat themselves, and hang up."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = engine.random
        self.prompts = [self.text(self.random.randrange(1, 60)) for _ in range(6)]

    def text(self, length: int) -> list[int]:
        return [self.random.randrange(997) for _ in range(length)]

    def speak(self) -> None:
        mood = self.random.random()
        if mood < 0.45 and self.engine.finished:
            past = self.random.choice(self.engine.finished[-40:])
            tokens = past + self.text(self.random.randrange(0, 20))
        elif mood < 0.6:
            tokens = self.random.choice(self.prompts)
        elif mood < 0.95:
            tokens = self.random.choice(self.prompts) + self.text(self.random.randrange(1, 70))
        else:
            tokens = self.text(self.random.randrange(1, 6))
        tokens = tokens[: MAX_MODEL_LEN // 2]
        for _ in range(2 if self.random.random() < 0.2 else 1):  # two at once with one prefix: S7.8, S7.26
            priority = self.engine.counts["submitted"] % 3
            self.engine.submit(tokens, max_tokens=self.random.randrange(1, 14), priority=priority)

    def hang_up(self) -> None:
        alive = [id for id, request in self.engine.requests.items() if not request.is_finished()]
        if not alive:
            return
        unusual = [id for id in alive if self.engine.requests[id].status not in (LOADING, RUNNING)]
        loading = [id for id in alive if self.engine.requests[id].status is LOADING]
        preempted = [id for id in alive if self.engine.requests[id].status is PREEMPTED]
        kinds = [alive, unusual or alive, loading or alive, preempted or alive]
        self.engine.abort(self.random.choice(self.random.choice(kinds)))


def live_through(engine: Engine, requests: int) -> None:
    users, random = Users(engine), engine.random
    while engine.counts["submitted"] < requests:
        while len(engine.requests) < 12:
            users.speak()
        if random.random() < 0.04:
            users.hang_up()
        if random.random() < 0.004:
            engine.reset()
        if random.random() < 0.05 and engine.restart_running():
            engine.counts["preempted by a reset"] += 1
        engine.step()
        if engine.counts["steps"] % 50 == 0:
            engine.cache.check_valid()
    engine.drain()


@pytest.mark.parametrize(
    ("offload", "blocks", "wanted"),
    [("lazy", 48, WITH_LITTLE_ROOM + EXCHANGES), ("lazy", 140, WITH_ROOM + EXCHANGES), ("eager", 48, WITH_LITTLE_ROOM)],
    ids=["lazy", "lazy with room", "eager"],
)
@pytest.mark.parametrize(
    ("ranks", "asynchronous", "seed", "sync_load_bytes"),
    [(1, False, 1, 0), (3, False, 5, FEW), (2, True, 3, FEW)],
    ids=["one-rank", "three-ranks", "async"],
)
def test_no_request_ever_reads_wrong_kv_and_nothing_leaks(
    tmp_path, ranks, asynchronous, seed, sync_load_bytes, offload, blocks, wanted
):
    options = dict(offload=offload, device_blocks=blocks, failure_rate=0.03, sync_load_bytes=sync_load_bytes)
    engine = Engine(tmp_path, ranks=ranks, asynchronous=asynchronous, seed=seed, **options)
    live_through(engine, requests=REQUESTS)
    print(sorted(engine.counts.items()), engine.cache.statistics())
    wanted += AWAITED if sync_load_bytes else ()
    wanted += BESIDE[: 2 if offload == "lazy" else 1] if asynchronous else ()
    missing = [what for what in wanted if not engine.counts[what]]
    engine.check_nothing_leaked()
    assert not missing, f"this never happened: {missing}"
