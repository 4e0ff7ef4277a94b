"""Keys against their meaning: two keys are equal if and only if everything before their chunks' ends is.

The model never hashes. It writes down, for each full chunk, who the request is, its tokens so far, and the items that
have begun; keys must be equal exactly where these are. Names, values and contents are drawn from few letters, so that
equal requests are common and so are those that a missing length would make equal.
"""

from array import array
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpu_prefix_cache import ChainHasher, ConfigurationError, MisuseError, MultimodalItem
from cpu_prefix_cache.model.hashing import checkpoint_key

ALGORITHMS = ["xxh3_128", "sha256"]
NAMES = ["", "a", "b", "ab", "ba", "aa", "é"]
words = st.binary(max_size=2).map(lambda drawn: bytes(b"ab"[byte % 2] for byte in drawn))
identities = st.dictionaries(st.sampled_from(NAMES), words, max_size=3)
harmless = st.text(max_size=4).filter(lambda name: name != "salt")
any_identities = st.dictionaries(harmless, st.binary(max_size=12), max_size=5)
items = st.lists(
    st.builds(
        lambda start, length, digest: MultimodalItem(start, start + length, digest),
        st.integers(0, 11),
        st.integers(1, 5),
        st.sampled_from([b"a", b"b", b"ab", b"aab"]),
    ),
    max_size=3,
)
prompts = st.lists(st.integers(0, 1), max_size=12)


class Prompt(NamedTuple):
    identity: dict[str, bytes]
    items: list[MultimodalItem]
    tokens: list[int]

    def keys(self, chunk: int, algorithm: str) -> list[bytes]:
        return ChainHasher(chunk, algorithm).for_request(self.identity, self.items).keys(self.tokens)

    def meanings(self, chunk: int) -> list[object]:
        """Meaning of each full chunk, in plain values."""
        ends = range(chunk, len(self.tokens) + 1, chunk)
        return [(self.identity, self.tokens[:end], self.begun(end)) for end in ends]

    def begun(self, end: int) -> list[tuple[int, int, bytes]]:
        return sorted((item.start, item.end, item.digest) for item in self.items if item.start < end)


requests = st.builds(Prompt, identities, items, prompts)
chunks = st.integers(1, 4)
ZEROS = [0] * 12
CAT, DOG = MultimodalItem(5, 7, b"a"), MultimodalItem(5, 7, b"b")


@st.composite
def relatives(draw: st.DrawFn, prompt: Prompt) -> Prompt:
    """The same request but for one small thing, which may come out the same."""
    fields, items = dict(prompt.identity), sorted(prompt.items)
    changes = ["rename", "value"] * bool(fields) + ["move", "stretch"] * bool(items) + ["swallow"] * (len(items) > 1)
    change = draw(st.sampled_from(changes)) if changes else "nothing"
    if change in ("rename", "value"):
        name = draw(st.sampled_from(sorted(fields)))
        value = fields.pop(name)
        fields |= {draw(st.sampled_from(NAMES)): value} if change == "rename" else {name: draw(words)}
    elif change in ("move", "stretch"):
        item = items.pop(draw(st.integers(0, len(items) - 1)))
        items.append(MultimodalItem(item.start + (change == "move"), item.end + 1, item.digest))
    elif change == "swallow":
        at = draw(st.integers(0, len(items) - 2))
        items[at : at + 2] = [swallowing(*items[at : at + 2])]
    return Prompt(fields, items, prompt.tokens)


def swallowing(first: MultimodalItem, second: MultimodalItem) -> MultimodalItem:
    """One item with the bytes of both, as they would stand one after the other without lengths."""
    place = b"".join(number.to_bytes(8, "little") for number in (second.start, second.end))
    return MultimodalItem(first.start, first.end, first.digest + place + second.digest)


families = st.lists(requests, min_size=1, max_size=4).flatmap(
    lambda drawn: st.tuples(*map(relatives, drawn)).map(lambda others: [*drawn, *others])
)


@given(families, chunks, st.sampled_from(ALGORITHMS))
@example([Prompt({"a": b"b"}, [], ZEROS), Prompt({"ab": b""}, [], ZEROS)], 1, "xxh3_128")
@example([Prompt({"a": b""}, [], ZEROS), Prompt({}, [], ZEROS)], 1, "xxh3_128")
@example([Prompt({}, [CAT], ZEROS), Prompt({}, [DOG], ZEROS), Prompt({}, [], ZEROS)], 4, "xxh3_128")
@example([Prompt({}, [CAT, DOG], ZEROS), Prompt({}, [DOG, CAT], ZEROS)], 4, "xxh3_128")
@example([Prompt({}, [CAT], ZEROS), Prompt({}, [CAT, CAT], ZEROS)], 4, "xxh3_128")
@example([Prompt({}, [CAT, DOG], ZEROS), Prompt({}, [swallowing(CAT, DOG)], ZEROS)], 4, "xxh3_128")
def test_keys_are_equal_exactly_where_their_meanings_are(drawn: list[Prompt], chunk: int, algorithm: str) -> None:
    told = [
        (key, meaning)
        for prompt in drawn
        for key, meaning in zip(prompt.keys(chunk, algorithm), prompt.meanings(chunk), strict=True)
    ]
    for (key, meaning), (other, other_meaning) in product(told, repeat=2):
        assert (key == other) == (meaning == other_meaning), (meaning, other_meaning)


@given(any_identities, any_identities, st.sampled_from(ALGORITHMS))
def test_identities_collide_only_if_equal(one: dict[str, bytes], other: dict[str, bytes], algorithm: str) -> None:
    """L5.3"""
    keys = [ChainHasher(1, algorithm).for_request(identity).keys([7]) for identity in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@given(any_identities, st.randoms(), st.sampled_from(ALGORITHMS))
def test_neither_order_nor_who_brings_a_field_matters(identity: dict[str, bytes], random, algorithm: str) -> None:
    shuffled = list(identity.items())
    random.shuffle(shuffled)
    cut = random.randint(0, len(shuffled))
    engine = ChainHasher(1, algorithm, dict(shuffled[:cut]))
    assert engine.for_request(dict(shuffled[cut:])).keys([7]) == ChainHasher(1, algorithm, identity).keys([7])


@given(any_identities, st.sampled_from(["salt", "cache_salt", "tenant"]), st.binary(max_size=4))
def test_whatever_else_a_salted_request_brings_it_is_refused_without_sha256(
    identity: dict[str, bytes], name: str, salt: bytes
) -> None:
    salted = {**identity, name: salt}
    with pytest.raises(MisuseError, match="sha256"):
        ChainHasher(1).for_request(salted)
    with pytest.raises(ConfigurationError, match="sha256"):
        ChainHasher(1, identity=salted)
    safe = ChainHasher(1, "sha256", tenants=True)
    unsalted = {field: value for field, value in salted.items() if field != name}
    assert safe.for_request(salted).keys([7]) != safe.for_request(unsalted).keys([7])


@given(requests, chunks, st.lists(st.integers(0, 12), max_size=6), st.sampled_from(ALGORITHMS))
@example(Prompt({}, [CAT], ZEROS), 4, [4], "xxh3_128")  # its tokens are not known when it is
def test_keys_do_not_depend_on_when_they_were_computed(
    prompt: Prompt, chunk: int, stops: list[int], algorithm: str
) -> None:
    request, keys = ChainHasher(chunk, algorithm).for_request(prompt.identity, prompt.items), []
    for stop in [*sorted(stops), len(prompt.tokens)]:
        before = list(keys)
        request.extend(keys, prompt.tokens[:stop])
        assert keys[: len(before)] == before  # what was hashed stays
        assert len(keys) == max(len(before), min(stop, len(prompt.tokens)) // chunk)
    assert keys == request.keys(prompt.tokens)


@given(requests, chunks)
def test_known_keys_are_not_hashed_again(prompt: Prompt, chunk: int) -> None:
    """Keys that no hasher made are gone on from, not replaced: only what is missing is computed, from the last."""
    request = ChainHasher(chunk).for_request(prompt.identity, prompt.items)
    whole = request.keys(prompt.tokens)
    for known in range(1, len(whole) + 1):
        keys = [b"foreign"] * (known - 1) + [whole[known - 1]]
        request.extend(keys, prompt.tokens)
        assert keys == [b"foreign"] * (known - 1) + whole[known - 1 :]


@st.composite
def arrays(draw: st.DrawFn) -> array:
    """Integers of one C type, near the ends of what it and tokens can be more often than not."""
    code = draw(st.sampled_from("iIlLqQ"))
    bits = 8 * array(code).itemsize
    low, high = (0, 2**bits - 1) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    ends = [end for end in (0, -1, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40) if low <= end <= high]
    tokens = st.integers(0, min(high, 2**32 - 1)) if draw(st.booleans()) else st.integers(low, high)
    return array(code, draw(st.lists(tokens | st.sampled_from(ends), max_size=6)))


@given(arrays(), chunks)
@example(array("i", [5, 2**31 - 1]), 1)  # all but the highest byte of a word have a highest bit
@example(array("I", [5, 2**31]), 1)
def test_arrays_are_read_as_lists_are(packed: array, chunk: int) -> None:
    hashed = packed.tolist()[: len(packed) - len(packed) % chunk]
    if all(0 <= token < 2**32 for token in hashed):
        assert ChainHasher(chunk).keys(packed) == ChainHasher(chunk).keys(hashed)
    else:
        with pytest.raises(MisuseError):
            ChainHasher(chunk).keys(packed)


@given(requests, chunks, st.sampled_from(ALGORITHMS))
def test_checkpoints_have_keys_no_chunk_has(prompt: Prompt, chunk: int, algorithm: str) -> None:
    keys = prompt.keys(chunk, algorithm)
    checkpoints = [checkpoint_key(key) for key in keys]
    assert not set(checkpoints) & set(keys)
    assert len(set(checkpoints)) == len(keys)
    assert all(len(checkpoint) == len(keys[0]) + 1 for checkpoint in checkpoints)  # no digest has this length
