"""Keys stay what they are: whoever persists or shares them relies on it (rule 17, L5.1, L5.3)."""

import hashlib
from array import array

import numpy
import pytest
import xxhash

from cpu_prefix_cache import ChainHasher, ConfigurationError, MisuseError

TOKENS = [0, 1, 2, 3, 2**32 - 1, 5, 6]
DIGESTS = {"xxh3_128": xxhash.xxh3_128_digest, "sha256": lambda data: hashlib.sha256(data).digest()}


def by_the_formula(digest, tokens, chunk, identity):
    """The chain as the module's first lines write it, one byte string at a time."""
    fields = [b"cpu-prefix-cache/1"]
    for name in sorted(identity):
        fields += [name.encode(), identity[name]]
    key = digest(b"".join(len(field).to_bytes(8, "little") + field for field in fields))
    keys = []
    for begin in range(0, len(tokens) - chunk + 1, chunk):
        key = digest(key + b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + chunk]))
        keys.append(key)
    return keys


@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("identity", [{}, {"salt": b"tenant", "lora": b"\x01"}], ids=["nobody", "somebody"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_keys_follow_the_formula(algorithm, identity, chunk):
    hasher = ChainHasher(chunk, algorithm, identity)
    assert hasher.keys(TOKENS) == by_the_formula(DIGESTS[algorithm], TOKENS, chunk, identity)


def test_golden_vectors():
    assert [key.hex() for key in ChainHasher(2).keys([1, 2, 3, 4])] == [
        "3549e37519372b13e1550ed47e9833f7",
        "bd3324e6a7f76a2441b2d7a64b54017a",
    ]
    salted = ChainHasher(2, "sha256", {"salt": b"tenant"})
    assert [key.hex() for key in salted.keys([1, 2])] == [
        "9746adc96815d4b71d76ea9c86a615313fc0e4e322c08c3ac22ded8ba1345727"
    ]


def test_hashing_piece_by_piece_is_hashing_at_once():
    hasher, keys = ChainHasher(2), []
    for end in range(len(TOKENS) + 1):
        hasher.extend(keys, TOKENS[:end])
        assert keys == hasher.keys(TOKENS[:end])
    assert len(keys) == 3  # the partial tail has no key


def test_equal_keys_mean_equal_prefixes_not_equal_chunks():
    assert ChainHasher(1).keys([7, 7])[0] != ChainHasher(1).keys([7, 7])[1]
    assert ChainHasher(1).keys([1, 9])[1] != ChainHasher(1).keys([2, 9])[1]


def test_identity_fields_cannot_be_confused():
    """L5.3"""
    identities = [
        {},
        {"lora": b""},
        {"lora": b"salt"},
        {"salt": b"lora"},
        {"lora": b"a", "salt": b"b"},
        {"lora": b"b", "salt": b"a"},
        {"lora": b"ab", "salt": b""},
        {"lorasalt": b"ab"},
    ]
    keys = {ChainHasher(1, identity=identity).keys([1])[0] for identity in identities}
    assert len(keys) == len(identities)


def test_the_order_of_identity_fields_means_nothing():
    one, other = {"lora": b"1", "salt": b"2"}, {"salt": b"2", "lora": b"1"}
    assert ChainHasher(1, identity=one).keys([1]) == ChainHasher(1, identity=other).keys([1])


@pytest.mark.parametrize(
    "tokens",
    [(1, 2, 3), array("I", [1, 2, 3]), array("q", [1, 2, 3]), numpy.array([1, 2, 3]), numpy.array([1, 2, 3], "int32")],
    ids=["tuple", "unsigned array", "signed array", "int64 array", "int32 array"],
)
def test_all_kinds_of_integers_agree(tokens):
    """L5.4"""
    assert ChainHasher(1).keys(tokens) == ChainHasher(1).keys([1, 2, 3])


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], [None]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(MisuseError, match="tokens must be integers"):
        ChainHasher(1).keys(tokens)


def test_configuration_is_checked_at_the_door():
    with pytest.raises(ConfigurationError, match="xxh3_128"):
        ChainHasher(16, "md5")
    with pytest.raises(ConfigurationError, match="at least 1"):
        ChainHasher(0)
