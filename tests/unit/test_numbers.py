"""Lists of blocks and tokens come as lists, ranges, arrays and tensors: inside they are ints, which can be keys."""

from array import array

import pytest
import torch

from cpu_prefix_cache.messages.numbers import numbers


@pytest.mark.parametrize("given", [[7, 8], (7, 8), range(7, 9), array("q", [7, 8]), torch.tensor([7, 8])])
def test_whatever_is_given_ints_come_out(given):
    assert numbers(given) == [7, 8]
    assert [type(each) for each in numbers(given)] == [int, int]
