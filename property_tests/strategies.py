"""Prompts that the machines draw: over two letters, so that any two of them share a beginning or part early."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

prompts = st.text("ab", min_size=1, max_size=6)
forests = st.lists(prompts, max_size=8)
positions = st.integers(0, 1_000)  # an index into whatever there is, by `pick`


def chain(prompt: str) -> list[bytes]:
    """The keys of a prompt of one letter to a chunk. The key of a chunk is all the letters up to it."""
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


def pick(things: Sequence[Any], position: int) -> Any:
    return things[position % len(things)]
