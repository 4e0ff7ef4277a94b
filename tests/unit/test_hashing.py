"""Keys stay what they are: whoever persists or shares them relies on it (rule 14, L5.1, L5.3)."""

import hashlib
from array import array

import numpy
import pytest
import torch
import xxhash

from cpu_prefix_cache import ChainHasher, ConfigurationError, MisuseError, MultimodalItem
from cpu_prefix_cache.model import hashing
from cpu_prefix_cache.model.hashing import checkpoint_key

TOKENS = [0, 1, 2, 3, 2**32 - 1, 5, 6]
DIGESTS = {"xxh3_128": xxhash.xxh3_128_digest, "sha256": lambda data: hashlib.sha256(data).digest()}


def prefixed(*fields):
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def by_the_formula(digest, tokens, chunk, identity, items=()):
    """The chain as the module's first lines write it, one byte string at a time."""
    fields = [b"cpu-prefix-cache/1"]
    for name in sorted(identity):
        fields += [name.encode(), identity[name]]
    key = digest(prefixed(*fields))
    keys = []
    for begin in range(0, len(tokens) - chunk + 1, chunk):
        data = key + b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + chunk])
        fields = []
        for start, end, content in sorted(items):
            if begin <= start < begin + chunk:
                fields += [start.to_bytes(8, "little"), end.to_bytes(8, "little"), content]
        key = digest(data + digest(prefixed(*fields)) + b"\x01" if fields else data)
        keys.append(key)
    return keys


@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("identity", [{}, {"model": b"llama", "lora": b"\x01"}], ids=["nobody", "somebody"])
@pytest.mark.parametrize("items", [[], [(1, 3, b"a"), (1, 2, b"b"), (5, 9, b"c")]], ids=["text", "items"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_keys_follow_the_formula(algorithm, identity, items, chunk):
    hasher = ChainHasher(chunk, algorithm, identity).for_request(items=[MultimodalItem(*item) for item in items])
    assert hasher.keys(TOKENS) == by_the_formula(DIGESTS[algorithm], TOKENS, chunk, identity, items)


def test_golden_vectors():
    """L5.1"""
    assert [key.hex() for key in ChainHasher(2).keys([1, 2, 3, 4])] == [
        "3549e37519372b13e1550ed47e9833f7",
        "bd3324e6a7f76a2441b2d7a64b54017a",
    ]
    salted = ChainHasher(2, "sha256", {"salt": b"tenant"})
    assert [key.hex() for key in salted.keys([1, 2])] == [
        "9746adc96815d4b71d76ea9c86a615313fc0e4e322c08c3ac22ded8ba1345727"
    ]


def test_golden_vectors_of_a_request_with_everything():
    """L5.1"""
    fields = {"lora": b"\x07", "salt": b"tenant"}
    items = [MultimodalItem(3, 5, b"picture"), MultimodalItem(2, 3, b"sound")]
    request = ChainHasher(2, "sha256", {"model": b"llama"}, tenants=True).for_request(fields, items)
    assert [key.hex() for key in request.keys([1, 2, 3, 4])] == [
        "e6ab5e7ec6b81d2ff5c7fda88287e3798f69d5717dc2681197a2ef8d204111af",
        "52047ac7778f5cecd7a0c5e0b0c272d6a087585ba11b450b3fe58d43283846da",
    ]
    pictured = ChainHasher(2).for_request({"lora": b"\x07"}, items)
    assert [key.hex() for key in pictured.keys([1, 2, 3, 4])] == [
        "ddfc1cd80dfeb11e6530ec7c34c4d28b",
        "3e886921a630c80dbd85b96ef4f653e8",
    ]
    assert (
        checkpoint_key(bytes.fromhex("3e886921a630c80dbd85b96ef4f653e8")).hex() == "3e886921a630c80dbd85b96ef4f653e802"
    )


def test_one_hasher_serves_many_tenants():
    engine = ChainHasher(2, "sha256", {"model": b"llama"}, tenants=True)
    ours, theirs = engine.for_request({"salt": b"ours"}), engine.for_request({"salt": b"theirs"})
    prompts = [hasher.keys(TOKENS) for hasher in (engine, ours, theirs)]
    assert len({key for keys in prompts for key in keys}) == 9  # three chunks each, none shared
    assert engine.for_request({"salt": b"ours"}).keys(TOKENS) == ours.keys(TOKENS)
    assert engine.for_request().keys(TOKENS) == engine.keys(TOKENS)  # the hasher itself is as before


def test_a_request_cannot_pass_for_another_model():
    hasher = ChainHasher(1, identity={"model": b"llama"})
    with pytest.raises(MisuseError, match=r"cannot be given by a request: \['model'\]"):
        hasher.for_request({"model": b"other"})


@pytest.mark.parametrize("name", ["salt", "cache_salt", "tenant"])
@pytest.mark.parametrize("value", [b"secret", b""], ids=["full", "empty"])
def test_salt_needs_a_cryptographic_digest(name, value):
    with pytest.raises(ConfigurationError, match="sha256"):
        ChainHasher(1, identity={name: value})
    fast = ChainHasher(1)
    with pytest.raises(MisuseError, match=f"'{name}'.*algorithm='sha256'"):
        fast.for_request({name: value})
    assert fast.for_request({"lora": value}).keys([1])  # what keeps nobody apart may be fast
    assert ChainHasher(1, "sha256").for_request({name: value}).keys([1])


def test_tenants_without_sha256_are_refused_at_the_start():
    with pytest.raises(ConfigurationError, match="tenants need algorithm 'sha256'"):
        ChainHasher(1, tenants=True)
    assert ChainHasher(1, "sha256", tenants=True).cryptographic
    assert not ChainHasher(1).cryptographic


@pytest.mark.parametrize("identity", [{"lora": "name"}, {"lora": 1}, {1: b"lora"}, {"lora": None}])
def test_identity_is_bytes_by_name(identity):
    with pytest.raises(ConfigurationError, match="must be bytes by name"):
        ChainHasher(1, identity=identity)
    with pytest.raises(MisuseError, match="must be bytes by name"):
        ChainHasher(1).for_request(identity)


def test_chunks_with_items_are_no_plain_chunks_of_another_size():
    """L5.3: the bytes behind the tokens cannot be written as tokens."""
    seen = []

    def spy(data):
        seen.append(data)
        return bytes(16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "DIGESTS", {"xxh3_128": spy})
        ChainHasher(2).for_request(items=[MultimodalItem(0, 1, b"cat")]).keys(range(4))
    with_item, plain = seen[-2:]
    assert (len(with_item) - 16) % 4 == 1 and (len(plain) - 16) % 4 == 0


@pytest.mark.parametrize("item", [(1, 1, b"cat"), (2, 1, b"cat"), (-1, 1, b"cat"), (0, 1, b""), (0, 1, "cat")])
def test_malformed_items_are_refused(item):
    with pytest.raises(MisuseError, match="item"):
        MultimodalItem(*item)


def test_decoding_hashes_nothing_twice():
    calls = []

    def counting(data):
        calls.append(data)
        return xxhash.xxh3_128_digest(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "DIGESTS", {"xxh3_128": counting})
        hasher = ChainHasher(4).for_request(
            {"lora": b"1"}, [MultimodalItem(1, 3, b"cat"), MultimodalItem(50, 51, b"d")]
        )
    tokens, keys = list(range(40)), []
    hasher.extend(keys, tokens)
    calls.clear()
    for token in range(40, 80):
        tokens.append(token)
        hasher.extend(keys, tokens)
    assert len(calls) == 10 and len(keys) == 20


KINDS = {
    "tuple": tuple,
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
    "bytes": bytes,
    "bytearray": bytearray,
    **{f"array {code}": lambda tokens, code=code: array(code, tokens) for code in "bBhHiIlLqQ"},
    **{
        f"numpy {dtype}": lambda tokens, dtype=dtype: numpy.array(tokens, dtype)
        for dtype in ("uint8", "int16", "int32", "uint32", "int64", "uint64", ">i4", ">u8")
    },
    "memoryview": lambda tokens: memoryview(array("i", tokens)),
    "every second": lambda tokens: numpy.repeat(numpy.array(tokens), 2)[::2],
    "backwards": lambda tokens: numpy.array(tokens[::-1], "int32")[::-1],
    "read-only": lambda tokens: numpy.frombuffer(array("I", tokens).tobytes(), "uint32"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_all_kinds_of_integers_agree(kind):
    """L5.4"""
    tokens = list(range(100, 108))
    assert ChainHasher(2).keys(kind(tokens)) == ChainHasher(2).keys(tokens)
    keys = ChainHasher(2).keys(tokens[:2])
    ChainHasher(2).extend(keys, kind(tokens))
    assert keys == ChainHasher(2).keys(tokens)
    assert ChainHasher(2).keys(kind(tokens)[:0]) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.5],
        ["1"],
        [None],
        "text",
        array("i", [1, -1]),
        array("q", [1, -1]),
        array("l", [-(2**31), 1]),
        array("q", [2**32]),
        array("Q", [2**63]),
        array("Q", [2**40]),
        array("d", [1.0]),
        array("f", [1.0]),
        array("b", [-1]),
        numpy.array([1.0]),
        numpy.array([-1]),
        numpy.array([-1], ">i4"),
        numpy.ones((2, 2), "int32"),
        numpy.array([True]),
    ],
    ids=repr,
)
def test_values_that_are_no_tokens_are_refused(tokens):
    keys = []
    with pytest.raises(MisuseError, match="tokens must be integers"):
        ChainHasher(1).extend(keys, tokens)
    assert keys == []


@pytest.mark.parametrize("row", [list, numpy.array, torch.tensor])
def test_a_batch_of_one_is_no_prompt(row):
    """It has one row, which is less than a chunk: no keys, and so no hits, without a word."""
    with pytest.raises(MisuseError, match="tokens must be integers"):
        ChainHasher(16).keys(row([list(range(64))]))


def test_a_machine_of_the_other_byte_order_swaps_its_words(monkeypatch):
    """L5.1"""
    little = ChainHasher(1).keys([0x01020304])
    monkeypatch.setattr(hashing.sys, "byteorder", "little" if hashing.sys.byteorder == "big" else "big")
    for tokens in ([0x04030201], array("I", [0x04030201]), array("i", [0x04030201])):
        assert ChainHasher(1).keys(tokens) == little


def test_configuration_is_checked_at_the_door():
    with pytest.raises(ConfigurationError, match="xxh3_128"):
        ChainHasher(16, "md5")
    with pytest.raises(ConfigurationError, match="at least 1"):
        ChainHasher(0)
