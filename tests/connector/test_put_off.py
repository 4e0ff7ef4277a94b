"""A checkpoint shortly before the end of a prompt is taken after the first token, from a fork of the request.

A document of 49 tokens has left a checkpoint at 48. One of 75 begins with it and needs one at 64: the 27 tokens that
are left are computed in one forward pass, and then 16 of them again. The control takes the checkpoint without these.
"""

import pytest

from tests.connector.serving import Pair, document, hit

FAMILIES = ("gemma3", "gpt_oss", "qwen3_5", "falcon_h1", "lfm2")
MODES = ("lazy", "eager", "off")


def first_and_again(pair, seed):
    """Answers to the second document: when the first one is known, and when it is known itself."""
    whole = document(seed, 75)
    pair.ask_right(whole[:49], 1)
    return pair.ask_right(whole, 1), pair.ask(whole, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_shortly_before_the_end_costs_the_first_token_no_forward_pass(family, mode):
    pair = Pair(family, mode)
    first, (again, off, same) = first_and_again(pair, 1)
    assert (hit(first), first.cuts) == (48, (75,))
    assert (hit(again), off <= pair.tolerance, same) == (64, True, True)
    if mode != "off":
        pair.cached.pool.reset()
        assert pair.ask_right(document(1, 75), 18).host_hit_tokens in ((64,) if mode == "eager" else (0, 64))
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_leaves_the_request_as_it_is(family):
    """The answer goes on after the fork has computed something else."""
    pair = Pair(family, "off")
    whole = document(2, 75)
    pair.ask_right(whole[:49], 1)
    assert pair.ask_right(whole, 20).cuts == (75,)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_more_tokens_are_left_the_prefill_stops_at_the_checkpoint(family):
    pair = Pair(family, "off")
    assert pair.ask_right(document(3, 60), 1).cuts == (48, 60)
    assert pair.ask_right(document(3, 60), 1).device_hit_tokens == 48


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_control_a_checkpoint_of_the_wrong_position_shows(family, monkeypatch):
    pair = Pair(family, "off")
    takes = pair.cached._catch_up

    def too_early(sequence, fork):
        monkeypatch.setattr(pair.cached, "_run", lambda *_: None)  # what the fork was to compute
        takes(sequence, fork)
        monkeypatch.undo()

    shown = 0
    for seed in range(8):
        whole = document(seed, 75)
        pair.ask_right(whole[:49], 1)
        monkeypatch.setattr(pair.cached, "_catch_up", too_early)
        pair.ask_right(whole, 1)
        monkeypatch.undo()
        answer, off, _ = pair.ask(whole, 1)
        assert hit(answer) == 64
        shown += off > pair.tolerance
        pair.cached.pool.reset()
    assert shown >= 7
