"""`--hints`: each request gets the time until its next use, right or as wrong as it is to be."""

import json
from math import inf

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.tools.cli import main
from cpu_prefix_cache.tools.replay.hints import Hints, hints_of, next_uses, with_hints
from tests.unit.replay.traces import mooncake_lines, random_prompts, trace_of, write


def test_the_next_use_is_the_next_prompt_that_begins_like_this_one():
    """One a second. The last block may have been cut short, so it need not come again."""
    trace = trace_of(["abc", "x", "abde", "x", "ab", "abdf"])
    assert next_uses(trace.requests) == [2.0, 2.0, 3.0, inf, 1.0, inf]


def test_wrong_hints_are_wrong_by_as_much_as_they_are_to_be():
    trace = trace_of(random_prompts(1, 2_000, letters="abcd"))
    exact = next_uses(trace.requests)
    assert [each.next_use for each in with_hints(trace, Hints()).requests] == exact
    given = [each.next_use for each in with_hints(trace, Hints(factor=2.0, share=0.25)).requests]
    wrong = [(right == inf) != (hint == inf) for right, hint in zip(exact, given, strict=True)]
    assert 0.2 < sum(wrong) / len(wrong) < 0.3
    ratios = [hint / right for right, hint in zip(exact, given, strict=True) if right < inf and hint < inf]
    assert 0.6 < sum(0.5 < ratio < 2.0 for ratio in ratios) / len(ratios) < 0.75  # within one standard deviation
    assert given == [each.next_use for each in with_hints(trace, Hints(factor=2.0, share=0.25)).requests]


def test_a_trace_that_uses_nothing_again_has_hints_too():
    given = with_hints(trace_of(["ab", "xy"]), Hints(factor=2.0, share=1.0))
    assert [each.next_use for each in given.requests] == [inf, inf]


@pytest.mark.parametrize(
    "text", ["", "soon", "noisy", "noisy:2", "noisy:0.5:0.1", "noisy:2:1.5", "noisy:nan:0.1", "exact:"]
)
def test_other_hints_are_refused_in_a_sentence(text):
    with pytest.raises(ConfigurationError, match="--hints is exact or noisy:FACTOR:SHARE, such as"):
        hints_of(text)


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.jsonl", mooncake_lines(random_prompts(2, 500, letters="abcdef", longest=5)))


@pytest.mark.parametrize("tiers", [[], ["--device-capacity", "20"], ["--below", "150"]])
def test_the_command_shows_what_hints_bring(trace, tmp_path, capsys, tiers):
    """To `adaptive`, and nothing to `lru`."""
    found = {}
    for hints in ([], ["--hints", "exact"]):
        out = tmp_path / "out.json"
        command = ["replay", trace, "--policy", "lru,adaptive", "--capacity", "60", *tiers, *hints, "--json", str(out)]
        assert main(command) == 0
        results = json.loads(out.read_text())
        assert results["hints"] == (hints[1] if hints else None)
        for each in results["results"]:
            found.setdefault(each["policy"], []).append((each["stored_blocks"], each["loaded_blocks"]))
    assert found["lru"][0] == found["lru"][1] and found["adaptive"][0] != found["adaptive"][1]
    assert "each request has the time until its next use for a hint" in capsys.readouterr().out
