"""Moves over the link, byte for byte: whatever is joined and cut, the same bytes move, and no move crosses a seam.

The model is a list of pairs of bytes, one for each byte that is to cross.
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache.memory.moves import columns, moves_of, pieces, whole_blocks

BASE = 10_000


def bytes_of(spans):
    return [(there + at, here + at) for there, here, size in spans for at in range(size)]


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 30)), max_size=12)


@given(spans, st.integers(1, 40))
def test_moves_bring_the_bytes_of_their_spans_in_their_order(spans, seam):
    moves = moves_of(spans, BASE, seam).listed()
    assert bytes_of(moves) == [(there, BASE + here) for there, here in bytes_of(spans)]
    for _, here, size in moves:
        assert size > 0 and (here - BASE) // seam == (here - BASE + size - 1) // seam


@given(spans, st.integers(1, 40))
def test_neighbours_become_one_unless_a_seam_is_between_them(spans, seam):
    moves = moves_of(spans, BASE, seam).listed()
    for (there, here, size), (next_there, next_here, _) in pairwise(moves):
        together = (there + size, here + size) == (next_there, next_here)
        assert not together or (next_here - BASE) % seam == 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(1, 30), st.integers(0, 100))
def test_runs_of_whole_blocks_are_their_pieces(blocks, block_bytes, begin):
    places = list(columns(0, block_bytes, block_bytes))
    begins = range(begin, begin + len(blocks) * block_bytes, block_bytes)
    runs = list(whole_blocks(begin, blocks, block_bytes))
    assert bytes_of(runs) == bytes_of(pieces(begins, blocks, 1, places, block_bytes))
    assert all(here + size != next_here for (_, here, size), (_, next_here, _) in pairwise(runs))


@given(st.data(), st.integers(1, 40), st.integers(0, 50), st.integers(1, 100))
def test_a_range_of_a_piece_lies_in_its_blocks_one_after_another(data, block_bytes, first, num_bytes):
    width = -(-(first + num_bytes) // block_bytes)
    blocks = data.draw(st.lists(st.integers(0, 30), min_size=2 * width, max_size=2 * width))
    places = list(columns(first, num_bytes, block_bytes))
    wanted = []
    for number, begin in enumerate((0, 1000)):
        mine = blocks[number * width : (number + 1) * width]
        piece = [block * block_bytes + byte for block in mine for byte in range(block_bytes)]
        wanted += list(zip(range(begin, begin + num_bytes), piece[first : first + num_bytes], strict=True))
    assert bytes_of(pieces((0, 1000), blocks, width, places, block_bytes)) == wanted
