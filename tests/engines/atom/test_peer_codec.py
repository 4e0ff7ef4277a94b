"""Demands of ATOM's tests on its LMCache connector's codec and on registration, made of ours.

Their file is in each comment; `test_peer_table.py` has all of their tests.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from connector.atom.tensors import bind
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.deciding import Direction, GroupCopy
from tests.engines.atom.double.atom.config import KVCacheTensor
from tests.engines.atom.double.atom.kv_transfer.disaggregation.types import KVTransferRegion, KVTransferTensors
from tests.engines.atom.peer import cases, their
from tests.unit.copier.bench import shapes_of

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

THEIRS = "tests/test_lmcache_offload_connector.py"


def codec_of(copier, damage=False):
    """Our copier with the methods of their codec. Their groups of blocks are pieces, and their buffer is our host."""

    class Codec:
        def __init__(self, kv_caches, num_blocks=None):
            layers = {name: KVCacheTensor(at, **vars(each)) for at, (name, each) in enumerate(kv_caches.items())}
            self.num_blocks = num_blocks or len(layers["l0"].k_cache)
            self._tensors = bind(layers, None, self.num_blocks).tensors
            self.bytes_per_block = bind(layers, None, self.num_blocks).block_bytes[0]
            self.device = torch.device("cpu")

        def gpu_to_chunk_major_device_buffer(self, buffer, groups):
            buffer.fill_(0xAB)
            self._copy(Direction.STORE, buffer, groups)

        def chunk_major_device_buffer_to_gpu(self, buffer, groups):
            if damage:
                buffer[0] ^= 1
            self._copy(Direction.LOAD, buffer, groups)

        def _copy(self, direction, buffer, groups):
            for blocks in groups:
                size = len(blocks) * self.bytes_per_block
                shapes, host = shapes_of(self._tensors, [len(blocks)], size), buffer[:size].view(1, size)
                choose_copier(shapes, self._tensors, host, name=copier).copier.copy(
                    direction, [GroupCopy(0, (0,), tuple(blocks))]
                )
                buffer = buffer[size:]

    return Codec


ROUND_TRIPS = (
    "test_codec_chunk_major_device_buffer_layout",
    "test_codec_chunk_major_handles_tail_and_sparse_blocks",
    "test_codec_mla_round_trip_byte_identical",
    "test_codec_dsa_includes_index_cache_segment",
    "test_codec_dsa_fp8_multilayer_including_mtp_round_trip",
)
NO_FAKES = {"_install_fake_fused_chunk_major": lambda codec: None, "_install_byte_addressing_fused": lambda codec: None}


@pytest.mark.parametrize("copier", ["reference", "staged"])
@pytest.mark.parametrize("name", [*ROUND_TRIPS, "test_codec_mla_token_major_block_accounting"])
def test_our_copier_passes_their_tests_of_the_codec(name, copier):  # test_lmcache_offload_connector.py
    codec = codec_of(copier)
    vars(their(THEIRS, name, torch=torch, DenseKVByteCodec=codec, **NO_FAKES))[name]()


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_damaged_byte_fails_them(name):
    test = vars(their(THEIRS, name, torch=torch, DenseKVByteCodec=codec_of("reference", damage=True), **NO_FAKES))[name]
    with pytest.raises(AssertionError):
        test()


# Registration


class Registering:
    """Our `bind` in the place of their connector."""

    _engine = None

    def register_kv_caches(self, kv_caches, transfer_tensors, num_blocks):
        fields = {"slot_regions": [], "num_blocks": num_blocks, **vars(transfer_tensors)}
        bind(kv_caches, KVTransferTensors(**fields), num_blocks)


def registration(*names):
    return their(
        THEIRS,
        "_page_transfer_tensors",
        *names,
        torch=torch,
        KVTransferRegion=KVTransferRegion,
        _registration_connector=Registering,
        _install_registration_dependencies=lambda monkeypatch: {},
    )


@pytest.mark.parametrize(
    "name",
    [
        "test_register_page_regions_rejects_invalid_region_geometry",
        "test_register_stateful_page_requires_full_slot_regions_before_engine_start",
    ],
)
def test_layouts_that_atoms_connector_refuses_are_refused(monkeypatch, name):  # test_lmcache_offload_connector.py
    vars(registration(name))[name](monkeypatch)


def test_slots_that_they_refuse_we_refuse(monkeypatch):  # test_lmcache_offload_connector.py
    name = "test_register_rejects_malformed_full_slot_geometry_before_engine_start"
    test = vars(registration(name))[name]
    tried = cases(test)
    del tried["boolean-expected-count"]  # True regions are 1
    assert len(tried) == 11
    for arguments in tried.values():
        test(monkeypatch, **arguments)


def test_well_formed_regions_are_accepted():
    """The control: the same regions without a fault."""
    regions = [KVTransferRegion(0x9000, 128, 32, reverse_indexed=True)]
    tensors = registration()._page_transfer_tensors(32, num_blocks=2)
    tensors = SimpleNamespace(
        **vars(tensors), num_slots=4, swa_block_regions=regions, expected_full_slot_region_count=1
    )
    Registering().register_kv_caches({}, tensors, 2)
