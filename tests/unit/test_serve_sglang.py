"""Engines and tokens of `benchmarks/sglang/serve.py`, with a simple engine in place of SGLang."""

import asyncio

import pytest

from benchmarks.sglang.serve import asking, parsed
from benchmarks.vllm.serve_loop import Loop, results
from benchmarks.vllm.serve_report import served_row


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("hi-cache@40", "there is no engine 'hi-cache@40': give none, or one of hicache, hicache-back, ours"),
        ("none@40", "there is no engine 'none@40'"),
        ("hicache", "hicache: give GiB of host memory behind the name, such as hicache@40"),
        ("ours@0", "ours@0: give GiB"),
    ],
)
def test_an_engine_that_cannot_start_is_refused_before_any_does(cell, message):
    with pytest.raises(ValueError, match=message):
        parsed(cell)


def test_both_kinds_of_host_memory_have_the_same_bytes():
    """SGLang multiplies its GB by 1e9."""
    (gib, hicache), (_, ours) = parsed("hicache@40"), parsed("ours@40")
    linker = ours["unified_cache_external_linker_config"]["linker_extra_config"]
    assert gib << 30 == linker["host_bytes"] == int(hicache["hicache_size"] * 1e9)
    assert parsed("none") == (0, {})


class Engine:
    """Streams its answers, as SGLang does: figures count from the beginning, and some outputs have several tokens."""

    async def async_generate(self, input_ids, sampling_params, stream):
        async def outputs():
            for tokens in (1, 3, sampling_params["max_new_tokens"]):
                await asyncio.sleep(0)
                yield {"meta_info": {"completion_tokens": tokens, "cached_tokens": len(input_ids) // 2}}

        assert stream
        return outputs()


def test_tokens_are_counted_once():
    loop = Loop(asking(Engine()), print, 2)
    asyncio.run(loop.closed([[([1] * 8, 4), ([2] * 8, 6)]]))
    assert [(each["cached"], len(each["tokens"])) for each in results(loop)] == [(4, 4), (4, 6)]
    assert served_row({"seconds": 1.0, "answered": results(loop)}, 1, None)["hit"] == 0.5
