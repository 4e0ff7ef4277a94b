"""ATOM's layouts through the real copiers: every byte of a block and of a unit comes back, and none beside it moves.

The KV is in host memory, and staged copies run in Triton's interpreter, unless COPIER_DEVICE names a device.
"""

import os
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from connector.atom import geometry
from connector.atom.rank_tier import architecture_of
from connector.atom.tensors import bind
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.deciding import Direction, GroupCopy, PrefixGroup, StateGroup
from cpu_prefix_cache.testing import CorruptingCopier
from tests.engines.atom.double.layouts import FP8, LAYOUTS, Model, latent, multi_head, pages_and_slots
from tests.engines.atom.test_double import real
from tests.unit.copier.bench import DEVICE, POISON, poisoned

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported


@dataclass
class Config:
    kv_cache_block_size: int = 16
    decode_context_parallel_size: int = 1
    max_model_len: int = 4096


def bound(model):
    return bind(model.kv_caches, model.regions, model.num_blocks)


class Bench:
    """A model's KV, a host region, and the copier between them."""

    def __init__(self, model, name, host_blocks=40, control=None):
        self.model = model
        self.bound = bound(model)
        self.planner = geometry.planner(Config(), self.bound.block_bytes)
        self.host = poisoned(host_blocks, self.planner.host_block_bytes)
        tensors = (self.bound.tensors[geometry.PAGES],) * len(self.planner.groups)
        self.copier = choose_copier(self.planner, tensors, self.host, name=name, ring_bytes=64 * 1024).copier
        if control is not None:
            self.copier = CorruptingCopier(self.copier, tensors, group=control)

    def copy(self, direction, pages=(), units=()):
        """A transfer of these blocks and units, each with host blocks that follow from its place in the list."""
        copies, first = [], 0
        for group, blocks in enumerate((pages, units)[: len(self.planner.pieces)]):
            count = len(blocks) * self.planner.pieces[group].host_blocks
            host_blocks = tuple(len(self.host) - 1 - each for each in range(first, first + count))
            copies.append(GroupCopy(group, host_blocks, tuple(blocks)))
            first += count
        self.copier.copy(direction, copies)

    def whole(self):
        """Contents of each block."""
        return [self.model.page_bytes(at).clone() for at in range(self.model.num_blocks)]


@pytest.fixture(params=["reference", "staged"])
def name(request):
    return request.param


def round_trip(bench):
    """Blocks 4, 0, 3, and as units 5 and 2, are stored, everything is poisoned, and they are loaded to others."""
    has_units = len(bench.planner.groups) > 1
    before = bench.whole()
    bench.copy(Direction.STORE, (4, 0, 3), (5, 2) if has_units else ())
    bench.model.fill(POISON)
    bench.copy(Direction.LOAD, (1, 4, 2), (0, 5) if has_units else ())
    moved = {1: 4, 4: 0, 2: 3} | ({0: 5, 5: 2} if has_units else {})
    return {here: before[was] for here, was in moved.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_a_block_comes_back_and_none_beside_it_moves(layout, name):  # S5.32
    bench = Bench(LAYOUTS[layout](), name)
    for here, expected in round_trip(bench).items():
        assert torch.equal(bench.model.page_bytes(here), expected)
        for part in bench.model.pages:
            part[here] = POISON
    assert all((each == POISON).all() for each in bench.model.memory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_block_is_seen(layout, name):
    for group, here in enumerate((1, 0)[: len(bound(LAYOUTS[layout]()).tensors)]):
        bench = Bench(LAYOUTS[layout](), name, control=group)
        expected = round_trip(bench)
        assert bench.copier.corrupted == 1
        assert not torch.equal(bench.model.page_bytes(here), expected[here])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_atoms_own_memory_and_a_block_weighs_what_atom_counts(layout):
    model = LAYOUTS[layout]()
    (block_bytes, *_), (parts, *_) = bound(model).block_bytes, bound(model).tensors
    assert block_bytes == model.page_bytes(0).numel()
    counted = sum(region.total_bytes for region in model.regions.block_regions)
    assert block_bytes * model.num_blocks == counted
    ends = [(each.data_ptr(), each.data_ptr() + each.numel()) for each in model.memory]
    for part in parts:
        assert any(begin <= part.data_ptr() and part.data_ptr() + part.numel() <= end for begin, end in ends)


def test_a_block_lies_on_the_host_layer_by_layer():  # rule 14
    model = multi_head(FP8)
    bench = Bench(model, "reference")
    bench.copy(Direction.STORE, (3,))
    key_value, scales = model.pages[:4], model.pages[4:]
    ordered = [*key_value[:2], *scales[:2], *key_value[2:], *scales[2:]]
    expected = torch.cat([part[3] for part in ordered])
    assert torch.equal(bench.host[-1][: expected.numel()], expected.cpu())
    assert bench.bound.spelled == (
        "1 x key float8_e4m3fnuz[2, 2, 16, 16], 1 x value float8_e4m3fnuz[2, 1, 32, 16], "
        "1 x key_scale float32[2, 16], 1 x value_scale float32[2, 16], "
        "1 x key float8_e4m3fnuz[2, 2, 16, 16], 1 x value float8_e4m3fnuz[2, 1, 32, 16], "
        "1 x key_scale float32[2, 16], 1 x value_scale float32[2, 16]",
    )


def test_slots_are_found_at_atoms_addresses():
    model = pages_and_slots()
    parts = bound(model).tensors[1]
    for slot in range(model.num_slots):
        found = [part[model.num_slots - 1 - slot].data_ptr() for part in parts]
        assert found == [region.unit_addr(slot) for region in model.regions.swa_block_regions]


def test_layers_that_share_their_kv_are_kept_once():
    model = latent(torch.bfloat16, layers=2)
    model.kv_caches["layer_2"] = model.kv_caches["layer_0"]
    assert len(bound(model).tensors[0]) == 2


def test_tensors_are_enough_where_there_are_no_regions():
    """An old builder, and ATOM's own tests."""
    model = multi_head(FP8)
    assert bind(model.kv_caches, None, model.num_blocks).block_bytes == bound(model).block_bytes


def test_blocks_beyond_four_gibibytes_are_addressed(name):  # S5.33
    """The memory is mapped and never touched, but for three blocks."""
    blocks = 5 * 2**20
    model = Model(blocks, memory=[torch.empty(blocks * 1024, dtype=torch.uint8, device=DEVICE)])
    part = model.page(model.memory[0].view(blocks, 1024))
    model.layer(k_cache=part.view(blocks, 1, 1024), v_cache=None)
    bench = Bench(model, name)
    far = blocks - 1
    here = blocks - 7
    near = (blocks - 1) % 2**22  # where 32 bits would look
    part[far] = torch.arange(1024)
    part[here] = POISON
    part[near] = POISON
    bench.copy(Direction.STORE, (far,))
    bench.copy(Direction.LOAD, (here,))
    assert torch.equal(part[here], part[far]) and (part[near] == POISON).all()
    assert not torch.equal(part[here], part[near]), "the control: it was not there before"


# Refusals


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("pages", "units"),
    [((0, 6), ()), ((0, -1), ()), ((0,), (6,)), ((0,), (-1,))],
)
def test_blocks_that_do_not_exist_are_refused_before_a_byte_is_copied(name, direction, pages, units):  # S5.32
    bench = Bench(pages_and_slots(), name)
    before = bench.whole(), bench.host.clone()
    with pytest.raises(MisuseError, match="device blocks must be from 0 to 5"):
        bench.copy(direction, pages, units)
    assert unchanged(bench, *before)


@pytest.mark.parametrize(("pages", "units"), [((1, 1), ()), ((1,), (2, 2))])
def test_a_block_is_not_loaded_twice_at_once(name, pages, units):  # S5.32
    bench = Bench(pages_and_slots(), name)
    before = bench.whole(), bench.host.clone()
    with pytest.raises(MisuseError, match="written twice"):
        bench.copy(Direction.LOAD, pages, units)
    assert unchanged(bench, *before)
    bench.copy(Direction.LOAD, (1,), (2,))
    assert not unchanged(bench, *before), "the control: what is not refused writes"


def unchanged(bench, whole, host):
    return torch.equal(bench.host, host) and all(map(torch.equal, bench.whole(), whole))


def with_state(count, regions=True):
    """A hybrid with recurrent layers: ATOM registers their slots like K and V, but they are no block regions."""
    model = multi_head(torch.bfloat16)
    conv, state = (model.allocate(count, 3, size, dtype=torch.float32) for size in (8, 16))
    model.layer(k_cache=conv, v_cache=state)
    return model if regions else replace(model, regions=None)


def strided(model):
    model.kv_caches["layer_0"].k_cache = model.kv_caches["layer_0"].k_cache.transpose(0, 1)
    return model


def elsewhere(model):
    model.kv_caches["layer_1"].k_cache = torch.empty_like(model.kv_caches["layer_1"].k_cache, device="meta")
    return model


def one_more_block(model):
    model.num_blocks += 1
    return model


def changed(**fields):
    model = pages_and_slots()
    for field, value in fields.items():
        setattr(model.regions, field, value)
    return model


def numbered_alike(reverse):
    model = pages_and_slots()
    for region in (*model.regions.block_regions, *model.regions.swa_block_regions):
        region.reverse_indexed = reverse
    return model


def of_other_units():
    model = pages_and_slots()
    model.regions.block_regions[0].unit_bytes = 512
    return model


REFUSED = {
    "a permuted tensor": (lambda: strided(multi_head(FP8)), "strides .* register it contiguous"),
    "rows that are not blocks": (lambda: one_more_block(latent(FP8)), "cannot be split into the 6 blocks"),
    "regions that are not blocks": (lambda: one_more_block(pages_and_slots()), "block region 0, 3840 bytes .* into 7"),
    "two devices": (lambda: elsewhere(latent(FP8)), r"one device, but is on \['.*', 'meta'\]"),
    "recurrent states": (lambda: with_state(4), "layer_2.*recurrent state"),
    "as many of them as blocks": (lambda: with_state(6), "none of ATOM's block regions.*recurrent state"),
    "nothing": (lambda: Model(4), "no KV"),
    "no blocks": (lambda: Model(0), "at least one block"),
    "slots that are not described": (lambda: changed(swa_block_regions=[]), "0 regions of 4 slots where it expects 2"),
    "a plane of slots that is missing": (
        lambda: changed(swa_block_regions=pages_and_slots().regions.swa_block_regions[:1]),
        "1 regions of 4 slots where it expects 2",
    ),
    "slots without a number": (lambda: changed(num_slots=0), "2 regions of 0 slots"),
    "slots of another kind": (lambda: changed(slot_regions=[object()]), "not known what they hold"),
    "slots numbered from the start": (lambda: numbered_alike(False), "slot region 0 is numbered from its start"),
    "blocks numbered from the end": (lambda: numbered_alike(True), "block region 0 is numbered from its end"),
    "units that do not fit": (of_other_units, "units of 512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_are_no_blocks_are_refused_with_a_sentence(case):
    make, reason = REFUSED[case]
    model = make()
    with pytest.raises(ConfigurationError, match=reason):
        bound(model)


# Agreements of the two sides


def test_groups_follow_from_the_bytes_of_a_block():
    config = Config(kv_cache_block_size=64, decode_context_parallel_size=2)
    dense = geometry.planner(config, [4096])
    assert (dense.grid_tokens, dense.chunk_bytes, dense.has_checkpoints) == (128, 4096, False)
    hybrid = geometry.planner(config, [4096, 9000], units=3)
    kinds = [type(group) for group in hybrid.groups]
    assert kinds == [PrefixGroup, *[StateGroup] * 3]
    assert hybrid.has_checkpoints and hybrid.checkpoint_bytes(3) == 3 * 4096
    with pytest.raises(ConfigurationError, match="3 groups"):
        geometry.groups(config, [1, 2, 3])


def test_ranks_report_bytes_as_an_operation():
    for block_bytes in ((4096,), (4096, 12288)):
        assert geometry.block_bytes_of(geometry.as_operation(block_bytes)) == block_bytes
    assert geometry.block_bytes_of(5) is None and geometry.block_bytes_of("request") is None


# ATOM's own codec, on the same tensors


@pytest.fixture
def their_codec(monkeypatch):
    module = ModuleType("atom_codec_as_it_is")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(real("atom/kv_transfer/offload/dense/kv_byte_codec.py"), vars(module))
    return module.DenseKVByteCodec


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "pages and slots"])
def test_their_codec_moves_what_is_registered_by_layer(their_codec, layout):
    """It reads no regions. So it leaves out the index of sparse MHA, and scales that are never read in bf16."""
    model = LAYOUTS[layout]()
    theirs = their_codec(model.kv_caches, model.num_blocks).bytes_per_block
    assert theirs == bind(model.kv_caches, None, model.num_blocks).block_bytes[0]
    alone = {"MHA, bf16", "sparse MHA with an index"}
    assert (theirs < bound(model).block_bytes[0]) == (layout in alone)


def test_their_codec_takes_states_for_blocks_if_the_bytes_divide(their_codec):
    model = with_state(4)
    their_codec(model.kv_caches, model.num_blocks)
    with pytest.raises(ConfigurationError, match="recurrent state"):
        bound(model)


def test_bytes_are_those_of_an_architecture_and_not_of_a_model(monkeypatch):
    """An MI300X and an MI325X run the same kernels, and find what the other has written."""
    named = [architecture_of(torch.device("cpu"))]
    for capability in ((9, 4), (9, 5), (9, 4)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, said=capability: said)
        named.append(architecture_of(torch.device("cuda")))
    assert named[1] == named[3] and len(set(named)) == 3
