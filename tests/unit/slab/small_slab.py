"""A slab spoken to in single letters: slot 3 holds "a". And what slabs of tests are made of."""

import mmap
import os

from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, WindowGroup
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.folder import Folder
from cpu_prefix_cache.slab.namespace import namespace_of
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.tier import RankPart

BLOCK = 8192
SLOTS = 16
POISON = 0xEE

FULL = PrefixGroup(name="full", block_tokens=16, block_bytes=BLOCK)
WINDOW = WindowGroup(name="window", window_tokens=32, block_tokens=16, block_bytes=BLOCK)

PIECES = (Piece(FULL, 1, 2, BLOCK + 100), Piece(WINDOW, 1, 1, BLOCK), Piece(WINDOW, 1, 2, 2 * BLOCK))


def planner(*groups, **more):
    return HybridChunkPlanner(groups or [FULL], max_model_len=4096, **more)


def namespace(**fields):
    same = {"model": "m", "revision": "r", "dtype": "bf16", "hash": "sha256", "ranks": 1}
    return namespace_of(fields.pop("planner", planner()), **{**same, **fields})


def open_slab(path, named=None, *, rank=0, ranks=1, slots=SLOTS, slot_bytes=BLOCK, nbytes=10**6, engine=0):
    tier = FileTier(str(path), nbytes, keep_others=True, engine=engine)
    return Slab(Folder(tier, named or namespace(), RankPart(slots, number=rank, owners=ranks), slot_bytes))


def key_of(letter):
    return letter.encode() * 32


def label(letter, generation, place=0, group=0, block=CHUNK):
    return Label(key_of(letter), b"", group, place, block, generation)


def page(content=b""):
    """An aligned view of a slot's size, poisoned behind `content`."""
    memory = mmap.mmap(-1, BLOCK)
    memory[:] = bytes([POISON]) * BLOCK
    memory[: len(content)] = content
    return memoryview(memory)


class Letters:
    """The slab at `path`. A letter's generation is that of the session plus its number."""

    def __init__(self, path, **fields):
        self.slab = open_slab(path, **fields)
        self.first = self.slab.next_generation

    def label(self, letter, **fields):
        return label(letter, self.first + ord(letter), **fields)

    def put(self, letters, slot=0):
        slots = range(slot, slot + len(letters))
        views = [page(letter.encode() * BLOCK) for letter in letters]
        self.slab.write(slots, views, [self.label(letter) for letter in letters])

    def get(self, letters, slot=0):
        """Slots as served: a letter, "." for a refused one."""
        slots = range(slot, slot + len(letters))
        views = [page() for _ in letters]
        refused = self.slab.read(slots, views, [self.label(letter) for letter in letters])
        served = zip(slots, views, strict=True)
        return "".join("." if slot in refused else _letter_in(view) for slot, view in served)

    @property
    def kept(self):
        """The letters that a restart would find, by slot."""
        found = map(self.slab.record, range(self.slab.slots))
        return "".join("." if record is None else chr(record.label.key[0]) for record in found)

    def file(self, name):
        return os.path.join(self.slab.folder, name)

    def damage(self, slot, at=0, name="blocks", width=BLOCK):
        """Flip one bit of a slot."""
        with open(self.file(name), "r+b") as file:
            file.seek(slot * width + at)
            byte = file.read(1)[0]
            file.seek(slot * width + at)
            file.write(bytes([byte ^ 1]))

    def reopen(self, path, **fields):
        """As after a restart. Labels keep their generations."""
        self.slab.close()
        self.slab = open_slab(path, **fields)


def _letter_in(view):
    letters = set(bytes(view))
    return chr(letters.pop()) if len(letters) == 1 else "?"
