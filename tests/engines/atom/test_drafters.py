"""With a drafter the host finds what ATOM's own prefix cache finds while it still has everything.

A drafter (MTP, Eagle) reads the token after each position, so the last of its KV in a block depends on a token that the
block's hash does not have. vLLM therefore computes the last block of a hit again. ATOM does not: what it reuses there
is at worst a worse draft, which the model verifies. So a hit of ours ends where one of ATOM's does.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from connector.atom import geometry
from tests.engines.atom.engine import Engine, config_of, serve, transfer_config
from tests.engines.atom.test_stories import DEVICE, PROMPT, check_at_rest, evict


class PromptsOnly(Engine):
    """Computes prompts. What a step verifies of an answer is not looked at."""

    def _compute(self, seq, start, stop, is_prefill):
        return super()._compute(seq, start, stop, is_prefill) if is_prefill else 0


def engine_of(offload, drafts):
    speculative = SimpleNamespace(num_speculative_tokens=drafts, use_dspark=lambda: False) if drafts else None
    transfer = transfer_config(256, offload=offload)
    return PromptsOnly(
        config_of(kv_transfer_config=transfer, num_kvcache_blocks=DEVICE, speculative_config=speculative)
    )


ASKED = {
    "the same prompt": PROMPT,
    "with another last token": [*PROMPT[:-1], 1],
    "the next turn": [*PROMPT, *range(200, 211)],
    "a sibling": [*PROMPT[:23], *range(300, 317)],
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_the_host_finds_what_the_device_would(offload, drafts, asked):
    engine = engine_of(offload, drafts)
    serve(engine, PROMPT)
    on_the_device = serve(engine, ASKED[asked]).prefix_cache_hit_tokens
    engine = engine_of(offload, drafts)
    serve(engine, PROMPT)
    evict(engine)
    on_the_host = serve(engine, ASKED[asked])
    assert on_the_host.prefix_cache_hit_tokens == on_the_device >= 20
    assert engine.connector.cache.statistics().hit_tokens > 0
    check_at_rest(engine)


def test_a_hit_that_ended_a_block_early_would_show(monkeypatch):
    """The control: as for vLLM's drafters."""
    groups = geometry.groups

    def with_lookahead(*given, **more):
        return tuple(replace(each, lookahead_tokens=1) if each.is_prefix else each for each in groups(*given, **more))

    monkeypatch.setattr(geometry, "groups", with_lookahead)
    engine = engine_of("eager", 1)
    serve(engine, PROMPT)
    evict(engine)
    assert serve(engine, ASKED["the next turn"]).prefix_cache_hit_tokens < 40
