"""A record is whole, of this rank and namespace, or nothing."""

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.slab.records import SIZE, Record, check_label, pack, parse, seed_of

SEED = seed_of(b"namespace", 0, 2)
LABEL = Label(b"k" * 32, b"p" * 32, 3, 65535, CHUNK, 2**40 + 7)
RECORD = Record(4_000_000_000, LABEL, b"c" * 16)


@pytest.mark.parametrize(
    "label",
    [
        LABEL,
        LABEL._replace(parent=b"", block=0, place=0, generation=0),
        LABEL._replace(key=b"k", parent=b"p" * 16, group=255, block=65534, generation=2**63 - 1),
        LABEL._replace(key=b"\0" * 32, parent=b"\0"),
    ],
)
def test_a_record_keeps_its_label(label):
    record = RECORD._replace(label=label)
    check_label(label)
    assert len(pack(record, SEED)) == SIZE
    assert parse(pack(record, SEED), SEED) == record


def test_no_single_bit_may_change():  # S8.2
    data = pack(RECORD, SEED)
    for bit in range(SIZE * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert parse(bytes(flipped), SEED) is None, f"bit {bit}"


def test_a_record_of_another_rank_or_namespace_is_none():  # S8.22
    data = pack(RECORD, SEED)
    for other in (seed_of(b"namespace", 1, 2), seed_of(b"namespace", 0, 4), seed_of(b"other", 0, 2)):
        assert parse(data, other) is None


def test_zeros_are_no_record():
    assert parse(bytes(SIZE), SEED) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"k" * 33},
        {"key": b""},
        {"parent": b"p" * 33},
        {"group": 256},
        {"group": -1},
        {"place": 65536},
        {"block": 65535},
        {"block": -2},
        {"generation": -1},
        {"generation": 2**63},
    ],
)
def test_labels_that_no_record_can_hold_are_misuse(fields):
    with pytest.raises(MisuseError):
        check_label(LABEL._replace(**fields))
