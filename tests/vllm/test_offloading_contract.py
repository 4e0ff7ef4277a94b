"""Our policies against what a policy is in every release of vLLM on file."""

import inspect

import pytest

import connector.vllm_offloading
from connector.vllm_offloading import AdaptivePolicy
from connector.vllm_offloading.interface import NEEDED
from tests.vllm.contract import abstract, imported_from_vllm, methods, names
from tests.vllm.releases import recorded

RELEASES = recorded()
FIRST = "0.31.0"
SERVED = [number for number in RELEASES if number >= FIRST]


@pytest.mark.parametrize("number", RELEASES)
def test_the_releases_that_have_the_interface_are_those_that_the_refusal_names(number):
    has_all = all({*members} <= names(RELEASES[number], name.split(".")[-1]) for name, members in NEEDED.items())
    assert has_all == (number in SERVED)


@pytest.mark.parametrize("number", SERVED)
def test_a_policy_has_every_method_that_it_must(number):
    assert abstract(RELEASES[number], "CachePolicy") <= set(dir(AdaptivePolicy))


@pytest.mark.parametrize("number", SERVED)
def test_every_method_of_a_policy_takes_what_the_release_gives(number):
    for name, parameters in methods(RELEASES[number], "CachePolicy").items():
        ours = inspect.signature(getattr(AdaptivePolicy, name))
        ours.bind(*(None for _ in parameters))
        assert [*ours.parameters][: len(parameters)] == parameters, name


@pytest.mark.parametrize("number", SERVED)
def test_imported_names_exist(number):
    theirs = imported_from_vllm(connector.vllm_offloading)
    assert theirs
    for node in theirs:
        assert {each.name for each in node.names} <= names(RELEASES[number], node.module)
