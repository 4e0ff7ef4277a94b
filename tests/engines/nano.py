"""nano-vllm serves stories on a CPU: a process of its own for each tree, because its modules have one name.

    python -m tests.engines.nano TREE STORIES ANSWERS        both JSON; a tree with a `host.py` has a host cache

A story lists the prompts that come, those that are aborted and when, and the faults of copies. An answer has for every
prompt that was not aborted its tokens, and of each token's logits the largest and the log-sum-exp.
"""

import json
import random
import sys
from pathlib import Path

from cpu_prefix_cache import HostOptions
from tests.support.troubled_copiers import COPIERS

DEVICE_BLOCKS = {16: 40, 256: 6}
PROMPTS = {16: 60, 256: 24}


def prompts_of(seed: int, size: int):
    """Prompts that share prefixes of several lengths, each with how many tokens it is to be answered with."""
    draw = random.Random(seed)
    lengths = (size, 8 * size) if size <= 16 else (size // 2, 3 * size)
    prefixes = [[draw.randrange(500) for _ in range(draw.randrange(*lengths))] for _ in range(8)]
    for _ in range(PROMPTS[size]):
        prefix = draw.choice(prefixes)
        tail = [draw.randrange(500) for _ in range(draw.randrange(1, 40))]
        yield prefix[: draw.randrange(10, len(prefix) + 1)] + tail, draw.randrange(1, 24)


class Server:
    """The engine with one story. `serve` returns {number: [[token, largest logit, log-sum-exp], ...]}."""

    def __init__(self, story):
        from tests.engines import nano_on_cpu as nano

        self.story, self.nano = story, nano
        config = type("Config", (), {})()
        config.max_num_seqs = 8
        config.max_num_batched_tokens = 16 * story["size"]
        config.eos = -1
        config.kvcache_block_size, config.num_kvcache_blocks = story["size"], DEVICE_BLOCKS[story["size"]]
        nano.Sequence.block_size = story["size"]
        self.engine = nano.LLMEngine.__new__(nano.LLMEngine)
        self.engine.model_runner = self.runner = nano.CPURunner(config)
        self.engine.scheduler = self.scheduler = nano.Scheduler(config)
        self.runner.call = lambda name, seqs, is_prefill: self._run(seqs, is_prefill)
        self.seen = {}  # sequence id -> what its tokens were drawn from

    def with_host(self):
        from host import Host

        story = self.story
        self.host = Host(
            self.scheduler,
            self.runner.kv_cache,
            host_bytes=story["host_bytes"],
            max_model_len=8192,
            max_step_tokens=8 * 4 * story["size"],
            options=HostOptions(
                offload=story["offload"],
                policy=story["policy"],
                strict=not story["reset"],
                wrap_copier=COPIERS[story["copies"]],
            ),
        )
        return self

    def _run(self, seqs, is_prefill):
        tokens = self.runner.run(seqs, is_prefill)
        for seq, row in zip(seqs, self.runner.logits, strict=True):
            self.seen.setdefault(seq.seq_id, {})[len(seq)] = [float(row.max()), float(row.logsumexp(-1))]
        return tokens

    def serve(self):
        story, nano = self.story, self.nano
        draw = random.Random(story["seed"])
        todo = list(enumerate(prompts_of(story["seed"], story["size"])))
        running = {}
        answers = {}
        doomed = {number: draw.randrange(1, 16) for number, _ in todo if draw.random() < story["aborts"]}  # in steps
        aborted, resets = 0, 0
        while todo or not self.scheduler.is_finished():
            for number, (prompt, max_tokens) in todo[:2]:
                options = nano.SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
                seq = nano.Sequence(prompt, options)
                running[seq.seq_id] = number, seq
                self.scheduler.add(seq)
            del todo[:2]
            finished, _ = self.engine.step()
            for id, tokens in finished:
                number, seq = running.pop(id)
                seen = self.seen[id]
                answers[number] = [[token, *seen[seq.num_prompt_tokens + at]] for at, token in enumerate(tokens)]
            loading = {seq.seq_id for seq in getattr(self.scheduler, "loading", ()) if seq.block_table}
            for id, (number, seq) in list(running.items()):
                if number not in doomed:
                    continue
                doomed[number] -= bool(seq.block_table)
                if doomed[number] <= 0 or id in loading:
                    aborted += id in loading
                    self.scheduler.abort(id)
                    del running[id]
            if story["reset"] and len(todo) == PROMPTS[story["size"]] // 2 and not resets:
                resets = 1
                self.reset()
            if hasattr(self, "host"):
                self.host.cache.cache.check_valid()
        return answers, {"aborted while loading": aborted, **self.rest()}

    def reset(self):
        """As for new weights, though these are the same: nobody finds what was computed before."""
        self.scheduler.block_manager.hash_to_block_id.clear()
        if hasattr(self, "host"):
            self.host.cache.reset()

    def rest(self):
        """Let all copies end. What the story came to."""
        counts = {"free": len(self.scheduler.block_manager.free_block_ids)}
        if hasattr(self, "host"):
            while self.host.cache.is_busy:
                self.host.cache.begin_step()
                self.host.end_step([])
            cache = self.host.cache.statistics().cache
            counts |= {name: getattr(cache, name) for name in ("hit_tokens", "chunks_stored", "loads_failed")}
            counts["free"] = len(self.scheduler.block_manager.free_block_ids)
        return counts


def main(tree: str, stories: str, answers: str) -> None:
    sys.path.insert(0, tree)
    has_host = (Path(tree) / "host.py").exists()
    all_answers = []
    for story in json.loads(Path(stories).read_text()):
        server = Server(story)
        all_answers.append((server.with_host() if has_host else server).serve())
    Path(answers).write_text(json.dumps(all_answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
