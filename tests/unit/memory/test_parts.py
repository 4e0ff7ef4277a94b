"""Parts: what engines have is declared as what copiers copy, and what cannot be copied is refused with the reason."""

import pytest
import torch

from cpu_prefix_cache import ConfigurationError, keys_and_values, latents
from cpu_prefix_cache.memory.parts import (
    Part,
    Role,
    block_bytes,
    blocks_first,
    canonical,
    check_apart,
    side_by_side,
)


def numbered(*shape, dtype=torch.int16):
    """A tensor whose elements count up."""
    count = torch.Size(shape).numel()
    return torch.arange(count).to(dtype).view(shape)


def as_int16(rows):
    return rows.contiguous().view(torch.int16).tolist()


def test_blocks_are_rows_of_bytes():
    part = blocks_first(0, Role.KEY, numbered(3, 2, 2))
    assert part.rows.dtype == torch.uint8
    assert as_int16(part.rows) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_part_is_the_engines_own_memory():
    tensor = numbered(3, 2, 2)
    blocks_first(0, Role.KEY, tensor).rows[1] = 0
    assert tensor[1].sum() == 0 and tensor[2].sum() == 8 + 9 + 10 + 11


def test_blocks_may_lie_apart():
    padded = numbered(4, 10)[:, 2:8]
    assert as_int16(block_bytes(padded)[1]) == [12, 13, 14, 15, 16, 17]
    block_bytes(padded)[1] = 0
    assert padded[1].sum() == 0
    assert padded[2].tolist() == [22, 23, 24, 25, 26, 27]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_any_dtype_will_do(dtype):
    assert blocks_first(0, Role.STATE, torch.zeros(3, 5, dtype=dtype)).rows.shape == (3, 5 * dtype.itemsize)


def test_k_and_v_come_apart_on_either_dimension():
    key, value = keys_and_values(numbered(2, 3, 4), block_dim=1)
    assert (as_int16(key.rows[1]), as_int16(value.rows[1])) == ([4, 5, 6, 7], [16, 17, 18, 19])
    key, value = keys_and_values(numbered(3, 2, 4), block_dim=0, kv_dim=1)
    assert (as_int16(key.rows[1]), as_int16(value.rows[1])) == ([8, 9, 10, 11], [12, 13, 14, 15])
    assert (key.role, value.role, key.layer) == (Role.KEY, Role.VALUE, 0)


@pytest.mark.parametrize(("shape", "kv_dim"), [((3, 2, 4), 0), ((2, 3, 4), 1), ((2, 2, 4), 2), ((2, 3), 2)])
def test_k_and_v_that_are_not_there_are_refused(shape, kv_dim):
    with pytest.raises(ConfigurationError, match="kv_dim"):
        keys_and_values(torch.zeros(shape), block_dim=0 if kv_dim else 1, kv_dim=kv_dim)


def test_a_tensor_of_tokens_is_cut_at_the_given_block_length():
    (part,) = latents(numbered(6, 3), block_tokens=3)
    assert as_int16(part.rows) == [list(range(9)), list(range(9, 18))]
    (part,) = latents(numbered(6, 3), block_tokens=2)
    assert as_int16(part.rows[2]) == list(range(12, 18))


@pytest.mark.parametrize("block_tokens", [4, 5, 7])
def test_tokens_that_are_not_blocks_are_refused(block_tokens):
    with pytest.raises(ConfigurationError, match="rows"):
        latents(numbered(6, 3), block_tokens=block_tokens)


def test_padding_between_tokens_tears_a_block():
    with pytest.raises(ConfigurationError, match="contiguous"):
        latents(numbered(6, 4)[:, :3], block_tokens=3)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(4, 6, 2).transpose(1, 2), "contiguous"),
        (torch.zeros(1, 6).expand(4, 6), "overlap"),
        (torch.zeros(4, 0), "bytes in it"),
        (torch.zeros(0, 4), "bytes in it"),
        (torch.zeros(4), "blocks, ..."),
    ],
)
def test_tensors_that_are_no_row_of_blocks_are_refused(tensor, reason):
    with pytest.raises(ConfigurationError, match=reason):
        block_bytes(tensor)


def test_the_order_is_that_of_layer_and_role_however_parts_were_declared():
    def part(layer, role, value, number=0):
        return blocks_first(layer, role, torch.full((2, 1), value, dtype=torch.uint8), number=number)

    declared = [
        part(1, Role.KEY, 10),
        part(0, Role.STATE, 4),
        part(0, Role.VALUE_SCALE, 3),
        part(0, Role.CONV_STATE, 6, number=1),
        part(0, Role.CONV_STATE, 5),
        part(0, Role.VALUE, 2),
        part(0, Role.KEY, 1),
    ]
    assert [int(rows[0, 0]) for rows in canonical(declared)] == [1, 2, 3, 5, 6, 4, 10]


def test_the_numbers_of_roles_are_in_bytes_that_others_keep():  # as LAYOUT_VERSION 2 has them
    kv = ["KEY", "VALUE", "LATENT", "INDEX", "KEY_SCALE", "VALUE_SCALE", "LATENT_SCALE", "INDEX_SCALE"]
    assert [role.name for role in sorted(Role)] == [*kv, "CONV_STATE", "STATE"]


def test_a_part_declared_twice_is_refused():
    with pytest.raises(ConfigurationError, match="key of layer 3 was declared twice"):
        canonical([blocks_first(3, Role.KEY, torch.zeros(2, 4)) for _ in range(2)])


def test_one_buffer_under_two_names_is_refused():  # layers that share their KV
    raw = torch.zeros(2, 4)
    with pytest.raises(ConfigurationError, match="key of layer 3 and the key of layer 9 are the same memory"):
        canonical([blocks_first(layer, Role.KEY, raw) for layer in (3, 9)])


def test_parts_that_share_bytes_are_refused_and_those_side_by_side_are_not():
    raw = torch.zeros(4, 32, dtype=torch.uint8)
    check_apart([raw[:, :16], raw[:, 16:]], "ab")
    check_apart([raw[:2], raw[2:]], "ab")
    for one, other in ((raw[:, :16], raw[:, 15:]), (raw[:3], raw[2:]), (raw, raw[1:2, :1])):
        for pair in ([one, other], [other, one]):
            with pytest.raises(ConfigurationError, match="the a and the b"):
                check_apart(pair, "ab")


def test_neighbours_within_every_block_are_joined():
    raw = torch.arange(4 * 32, dtype=torch.uint8).view(4, 32)
    joined = side_by_side([raw[:, :8], raw[:, 8:16], raw[:, 20:24], raw[:, 24:30]])
    assert [rows.tolist() for rows in joined] == [raw[:, :16].tolist(), raw[:, 20:30].tolist()]
    apart = [raw[:, 8:16], raw[:, :8]]  # the order on the host is not that of the device
    assert [rows.data_ptr() for rows in side_by_side(apart)] == [rows.data_ptr() for rows in apart]


def test_a_part_prints_its_role_layer_and_number():
    assert str(Part(2, Role.KEY_SCALE, torch.zeros(1))) == "key scale of layer 2"
    assert str(Part(2, Role.CONV_STATE, torch.zeros(1), number=1)) == "conv state of layer 2 (number 1)"
