"""Boundaries of a request, out of the keys of vLLM and where they end."""

from connector.vllm_offloading.chains import BoundaryChain
from tests.vllm.offloading import BLOCK, key


def chain_of(*ends):
    chain = BoundaryChain()
    chain.extend({key(text, group): tokens for text, group, tokens in ends})
    return chain


def digest(text):
    return key(text)[:-4]


def test_one_group_has_a_boundary_for_each_key():
    chain = chain_of(("a", 0, 16), ("ab", 0, 32))
    assert chain.hashes == [digest("a"), digest("ab")]
    assert [chain.place(key(text)) for text in ("a", "ab", "x")] == [0, 1, None]
    assert [*chain.keys(1)] == [key("ab")]


def test_the_longest_block_of_all_groups_makes_the_boundaries():
    fine = [(text, 0, BLOCK * at) for at, text in enumerate(("a", "ab", "abc", "abcd"), 1)]
    chain = chain_of(*fine, ("ab", 1, 32), ("abcd", 1, 64))
    assert chain.hashes == [digest("ab"), digest("abcd")]
    assert [*chain.keys(0)] == [key("a"), key("ab"), key("ab", 1)]
    assert chain.place(key("abc")) == chain.place(key("abcd", 1)) == 1


def test_keys_after_the_last_boundary_have_no_place_until_that_is_there():
    ends = {key("a"): 16, key("ab"): 32, key("ab", 1): 32, key("abc"): 48}
    chain = BoundaryChain()
    chain.extend(ends)
    assert chain.place(key("abc")) is None
    ends |= {key("abcd"): 64, key("abcd", 1): 64}
    chain.extend(ends)
    assert chain.place(key("abc")) == 1
    assert chain.hashes == [digest("ab"), digest("abcd")]


def test_a_boundary_that_comes_before_the_one_above_it_waits_for_that():
    ends = {key("a"): 16, key("abc"): 48}
    chain = BoundaryChain()
    chain.extend(ends)
    assert chain.hashes == [digest("a")]
    ends[key("ab")] = 32
    chain.extend(ends)
    assert chain.hashes == [digest("a"), digest("ab"), digest("abc")]


def test_no_keys_are_no_boundaries():
    chain = chain_of()
    assert chain.hashes == []
    assert chain.place(key("a")) is None
