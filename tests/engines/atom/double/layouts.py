"""KV as ATOM's builders allocate and register it, for each of its layouts, and small.

A model here has `memory`, all that is allocated, and `pages` and `slots`, the bytes of each block and slot where the
builder's own indexing finds them: `pages[part][block]`. What is registered is `kv_caches` and `regions`.
"""

import math
from dataclasses import dataclass, field

import torch

from tests.unit.copier.bench import DEVICE

from .atom.config import KVCacheTensor
from .atom.kv_transfer.disaggregation.types import KVTransferRegion, KVTransferTensors

FP8 = torch.float8_e4m3fnuz


@dataclass
class Model:
    num_blocks: int
    kv_caches: dict = field(default_factory=dict)
    regions: KVTransferTensors = None
    memory: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    slots: list = field(default_factory=list)
    num_slots: int = 0

    def __post_init__(self):
        self.regions = self.regions or KVTransferTensors([], [], self.num_blocks)

    def allocate(self, *shape, dtype):
        """A tensor of random bytes."""
        count = math.prod(shape) * dtype.itemsize
        generator = torch.Generator().manual_seed(len(self.memory))
        self.memory.append(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(DEVICE))
        return self.memory[-1].view(dtype).view(shape)

    def page(self, tensor, per_block=1):
        """A tensor whose first dimension counts physical blocks, `per_block` of them in one of the scheduler's."""
        stride = tensor.stride(0) * tensor.element_size()
        self.regions.block_regions.append(
            KVTransferRegion(tensor.data_ptr(), tensor.numel() * tensor.element_size(), stride * per_block)
        )
        self.pages.append(tensor.contiguous().view(torch.uint8).view(self.num_blocks, -1))
        return tensor

    def layer(self, **tensors):
        number = len(self.kv_caches)
        self.kv_caches[f"layer_{number}"] = KVCacheTensor(number, **tensors)

    def page_bytes(self, block):
        return torch.cat([part[block] for part in self.pages])

    def slot_bytes(self, slot):
        return torch.cat([part[slot] for part in self.slots])

    def fill(self, value):
        for each in self.memory:
            each.fill_(value)


def multi_head(dtype, layers=2, blocks=6, per_block=1, heads=2, tokens=16, width=32, index_layers=0):
    """K and V packed by 16 bytes, and float scales for each head and token: registered by layer only if it is fp8."""
    model = Model(blocks)
    physical = blocks * per_block
    x = 16 // dtype.itemsize
    cache = model.allocate(2, layers, physical, tokens, heads, width, dtype=dtype)
    scale = model.allocate(2, layers, physical, heads, tokens, dtype=torch.float32)
    for layer in range(layers):
        key, value = (model.page(cache[at, layer]) for at in range(2))
        scales = {"k_scale": scale[0, layer], "v_scale": scale[1, layer]} if dtype == FP8 else {}
        model.layer(
            k_cache=key.view(physical, heads, width // x, tokens, x),
            v_cache=value.view(physical, heads, tokens // x, width, x),
            **scales,
        )
    for layer in range(layers):
        for at in range(2):
            model.page(scale[at, layer])
    if index_layers:  # sparse attention over K and V: its index is registered as a region alone
        index = model.allocate(index_layers, physical, tokens, 8, dtype=torch.bfloat16)
        for layer in range(index_layers):
            model.page(index[layer])
    return model


def of_unlike_layers(blocks=5, tokens=16, width=32):
    """MiMo-V2: layers have tensors of their own, with different numbers of heads."""
    model = Model(blocks)
    for heads in (1, 4, 2):
        key = model.allocate(blocks, heads, width // 16, tokens, 16, dtype=FP8)
        value = model.allocate(blocks, heads, tokens // 16, width, 16, dtype=FP8)
        scales = [model.allocate(blocks, heads, tokens, dtype=torch.float32) for _ in range(2)]
        for each in (key, value, *scales):
            model.page(each)
        model.layer(k_cache=key, v_cache=value, k_scale=scales[0], v_scale=scales[1])
    return model


def latent(dtype, layers=3, blocks=5, tokens=8, width=576, index_width=0):
    """MLA: a row for each token. With `index_width`, DeepSeek-V3.2's index; the last layer is an MTP layer."""
    model, rows = Model(blocks), blocks * tokens
    cache = model.allocate(layers, rows, 1, width, dtype=dtype)
    index = model.allocate(layers, rows, 1, index_width, dtype=FP8) if index_width else [None] * layers
    for layer in range(layers):
        model.page(cache[layer], tokens)
        model.layer(k_cache=cache[layer].view(rows, 1, width), v_cache=None, index_cache=index[layer])
    for layer in range(layers if index_width else 0):
        model.page(index[layer], tokens)
    return model


def latent_with_draft(blocks=5, tokens=8):
    """An MLA model with an Eagle3 draft, whose K and V lie apart from it and are not packed alike."""
    model = latent(torch.bfloat16, blocks=blocks, tokens=tokens)
    draft = model.allocate(2, 1, blocks, tokens, 2, 32, dtype=torch.bfloat16)
    key, value = (model.page(draft[at, 0]) for at in range(2))
    model.layer(k_cache=key.view(blocks, 2, 4, tokens, 8), v_cache=value.view(blocks, 2, 32, tokens))
    return model


def pages_and_slots(blocks=6, slots=4, spare=1):
    """DeepSeek-V4: two planes whose pages grow from the start and whose slots are numbered from the end; an indexer.

    Nothing is registered by layer. Between the pages and the slots `spare` slots are nobody's.
    """
    model = Model(blocks, num_slots=slots)
    planes = {"dsv4.main_kv.nope": (640, 1536), "dsv4.main_kv.rope": (128, 320)}
    for role, (page, slot) in planes.items():
        plane = model.allocate(blocks * page + (slots + spare) * slot, dtype=torch.uint8)
        model.pages.append(plane[: blocks * page].view(blocks, page))
        first = plane.numel() - slots * slot
        model.slots.append([plane[plane.numel() - (at + 1) * slot :][:slot] for at in range(slots)])
        address = plane.data_ptr()
        model.regions.block_regions.append(KVTransferRegion(address, blocks * page, page, semantic_role=role))
        model.regions.swa_block_regions.append(
            KVTransferRegion(address + first, slots * slot, slot, reverse_indexed=True, semantic_role=role)
        )
    index = model.allocate(2, blocks, 4, 36, dtype=FP8)
    for layer in range(2):
        model.page(index[layer])
        model.regions.block_regions[-1].semantic_role = f"dsv4.csa_indexer.layer_{layer}"
    model.regions.num_slots = slots
    model.regions.expected_full_slot_region_count = len(planes)
    return model


LAYOUTS = {
    "MHA, bf16": lambda: multi_head(torch.bfloat16),
    "GQA, fp8 with scales, two kernel blocks to a block": lambda: multi_head(FP8, per_block=2),
    "sparse MHA with an index": lambda: multi_head(torch.bfloat16, layers=3, index_layers=2),
    "layers unlike each other, fp8": of_unlike_layers,
    "MLA": lambda: latent(torch.bfloat16),
    "MLA, fp8, with an index and an MTP layer": lambda: latent(FP8, index_width=144),
    "MLA with an MHA draft": latent_with_draft,
    "pages and slots": pages_and_slots,
}
