"""Settings of a tier: refusals, the identity of the bytes in it, and how ranks share it."""

import errno
import json
import os
from copy import copy
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.tier.weights import weights_of
from connector.vllm import rank_tier, ranks, regions, tier_options
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.rank_tier import Onlooker
from connector.vllm.settings import Settings
from connector.vllm.tensors import order_of
from connector.vllm.tier_namespace import row_order
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache import ConfigurationError, FileTier
from cpu_prefix_cache.deciding import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.memory import mapping
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.model.planner import PAGE_BYTES
from cpu_prefix_cache.slab import opening
from cpu_prefix_cache.slab.generations import MARK
from tests.support.tier_refusals import REFUSED
from tests.vllm.engine import drafting, full, latent, one_group, vllm_config, window
from tests.vllm.test_ranks import BLOCKS, latent_caches, plain_caches

HOST, SIZE = 1 << 20, 8 << 20
KEY = bytes(range(32))


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


def configure(folder, said=None, *, host=HOST, **parallel):
    """A configuration with `said` as the operator's options of the tier."""
    config = vllm_config(folder, cpu_bytes_to_use=host, tier=said)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    config.instance_id, config.cache_config.num_gpu_blocks = "test", BLOCKS
    return config


def tier(path, **more):
    return {"kind": "file", "path": str(path), "bytes": SIZE, "revision": "1"} | more


def settings_of(config, *groups):
    caches = KVCacheConfig(BLOCKS, [], list(groups)) if groups else one_group(BLOCKS)
    return Settings.of(config, caches)


def build(config, *groups):
    return settings_of(config, *groups).build(SimpleNamespace(num_blocks=BLOCKS, null_block=0, blocks_per_chunk=None))


# Options


@pytest.mark.parametrize(("more", "sentence"), REFUSED)
def test_invalid_options_of_a_tier_are_refused(tmp_path, path, more, sentence):
    with pytest.raises(ConfigurationError) as refused:
        settings_of(configure(tmp_path, {**tier(path), **more}))
    assert str(refused.value) == sentence


@pytest.mark.parametrize("missing", ["kind", "path", "bytes"])
def test_the_missing_field_is_named(tmp_path, path, missing):
    said = {name: value for name, value in tier(path).items() if name != missing}
    with pytest.raises(ConfigurationError, match=f"a tier needs {missing}; its keys are kind, path, bytes"):
        settings_of(configure(tmp_path, said))


@pytest.mark.parametrize("said", [["file"], None])
def test_a_tier_is_a_text_or_a_dictionary(tmp_path, said):
    with pytest.raises(ConfigurationError, match=r"a tier is a text .* or a dictionary with kind, path, bytes .*; got"):
        settings_of(configure(tmp_path, said))


def test_a_text_and_a_dictionary_say_the_same(tmp_path, path, monkeypatch):
    monkeypatch.setattr(tier_options, "weights_of_all", lambda config: "some weights")
    spelled = f"file:{path}:{SIZE}", {"kind": "file", "path": str(path), "bytes": SIZE}
    one, other = (settings_of(configure(tmp_path, said)).tier for said in spelled)
    assert one == other


# What vLLM must be


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_keys_that_are_not_cryptographic_are_refused(tmp_path, path, algorithm):
    config = configure(tmp_path, tier(path))
    config.cache_config.prefix_caching_hash_algo = algorithm
    with pytest.raises(ConfigurationError, match=f"'{algorithm}'; start it with --prefix-caching-hash-algo sha256"):
        settings_of(config)


def test_adapters_have_names_only_so_a_revision_is_required(tmp_path, path):
    said = tier(path)
    config = configure(tmp_path, said)
    config.lora_config = LoRAConfig(max_lora_rank=8)
    assert settings_of(config).tier is not None
    del said["revision"]
    config.kv_transfer_config.kv_connector_extra_config["tier"] = said
    with pytest.raises(ConfigurationError, match=r"with LoRA .* give the tier a revision"):
        settings_of(config)


def test_a_tier_that_holds_little_but_what_the_host_has_is_refused(tmp_path, path):
    config = configure(tmp_path, tier(path, bytes=2 * HOST))  # records need some bytes, too
    with pytest.raises(ConfigurationError, match=r"the host has 256 blocks, so give the tier at least .* bytes"):
        build(config)


# Identity


def identity(config, *groups):
    return settings_of(config, *groups).tier.namespace


def test_everything_that_decides_bytes_or_keys_is_in_the_namespace(tmp_path, path):
    def of(change=lambda config: None, *groups, **more):
        config = configure(tmp_path, tier(path, **more))
        change(config)
        return identity(config, *groups)

    def set_to(part, name, value):
        return lambda config: setattr(getattr(config, part), name, value)

    def set_rope(config):
        config.model_config.hf_config.rope_theta = 5.0

    namespaces = [
        of(),
        of(revision="2"),
        of(model="another"),
        of(set_to("cache_config", "cache_dtype", "fp8")),
        of(set_to("cache_config", "prefix_caching_hash_algo", "sha256_cbor")),
        of(set_to("parallel_config", "tensor_parallel_size", 2)),
        of(set_to("parallel_config", "pipeline_parallel_size", 2)),
        of(set_to("model_config", "dtype", torch.bfloat16)),
        of(set_to("model_config", "quantization", "fp8")),
        of(set_to("device_config", "device_type", "cuda")),
        of(set_rope),
        of(lambda config: None, full(layers=3)),
        of(lambda config: None, full(), window(8)),
    ]
    assert len({each.folder for each in namespaces}) == len(namespaces)
    assert of() == of() == of(offload="eager", bytes=2 * SIZE)


def set_rope(kind, length):
    def change(config):
        config.model_config.hf_config.rope_parameters = {"rope_type": kind}
        config.model_config.max_model_len = length

    return change


def set_llama4(length):
    def change(config):
        config.model_config.hf_config.text_config = {"model_type": "llama4_text"}
        config.model_config.max_model_len = length

    return change


def set_auto(config):
    config.model_config.original_max_model_len = -1


def changed(tmp_path, path, *changes):
    """The namespace of an engine with these changes of its configuration."""
    config = configure(tmp_path, tier(path))
    for change in changes:
        change(config)
    return identity(config)


@pytest.mark.parametrize("depends", [partial(set_rope, "longrope"), set_llama4])
def test_a_model_whose_keys_depend_on_the_length_has_a_folder_for_each(tmp_path, path, depends):
    """vLLM rotates K by other factors, or scales it otherwise, in a server with another --max-model-len."""
    short, long = (changed(tmp_path, path, depends(length)) for length in (32, 64))
    assert short.folder != long.folder
    assert changed(tmp_path, path, depends(32)) == short


@pytest.mark.parametrize("lengths", [(32, 64), (64, 32)])
def test_a_length_that_vllm_fits_to_the_memory_is_not_that_of_the_model(tmp_path, path, lengths):
    """It is known after the model is built, and is another one after each start."""
    first, again = (changed(tmp_path, path, set_rope("longrope", each), set_auto) for each in lengths)
    assert first == again != changed(tmp_path, path, set_rope("longrope", lengths[0]))


def test_other_models_have_one_folder_for_all_lengths(tmp_path, path):
    """The one that they had before lengths were counted."""
    short, long = (changed(tmp_path, path, set_rope("yarn", length)) for length in (32, 64))
    assert short == long and "model length" not in short.spelled


def set_media(**fields):
    def change(config):
        config.model_config.multimodal_config = MultiModalConfig(**fields)

    return change


def set_quantization(config):
    config.model_config.quantization_config = QuantizationConfigArgs(ignore=["lm_head"])


def set_adapted(config):
    config.lora_config = LoRAConfig(max_lora_rank=8, target_modules=["o_proj"])


def set_model(**fields):
    def change(config):
        vars(config.model_config).update(fields)

    return change


def set_draft(dtype):
    def change(config):
        config.speculative_config = drafting("eagle", draft_model_config=config.model_config, kv_cache_dtype=dtype)

    return change


def set_trusted(config):
    config.model_config.trust_remote_code = True


def test_options_that_no_key_has_are_in_the_namespace(tmp_path, path):
    """vLLM hashes an image, and not what the server's options make of it."""
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    changes = [
        set_media(),
        set_media(mm_processor_kwargs={"max_pixels": 100352}),
        set_media(mm_processor_kwargs={"max_pixels": 1003520}),
        set_media(media_io_kwargs={"video": {"num_frames": 40}}),
        set_media(video_pruning_rate=0.5),
        set_media(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        set_media(mm_encoder_attn_dtype="fp8"),
        set_media(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)),
        set_quantization,
        set_adapted,
        set_model(model_impl="transformers"),
        set_model(model_class_overrides={"LlamaForCausalLM": "mine:Llama"}),
        set_model(code_revision="one"),
        set_model(code_revision="other"),
        set_draft(None),
        set_draft("fp8_e5m2"),
    ]
    folders = [changed(tmp_path, path, change).folder for change in changes]
    assert len(set(folders)) == len(folders)
    assert folders == [changed(tmp_path, path, change).folder for change in changes]


@pytest.mark.parametrize("changes", [(set_trusted,), (set_trusted, set_media())])
def test_code_in_the_folder_of_a_model_that_is_trusted_is_in_the_namespace(tmp_path, path, changes):
    """A folder whose code was edited in its place has the name, the weights and the configuration of before."""
    folders = [changed(tmp_path, path, *changes).folder]
    (tmp_path / "parts").mkdir()
    for file, text in (("modeling.py", "a"), ("modeling.py", "b"), ("parts/rope.py", "b"), ("parts/norm.py", "b")):
        (tmp_path / file).write_text(text)
        folders.append(changed(tmp_path, path, *changes).folder)
    assert len(set(folders)) == len(folders)
    assert changed(tmp_path, path, *changes).folder == folders[-1]
    assert changed(tmp_path, path, *changes[1:]).folder == folders[0], "code counts that nobody runs"


def test_code_of_a_drafter_that_is_trusted_is_in_the_namespace(tmp_path, path):
    drafter = tmp_path / "drafter"
    drafter.mkdir()

    def set_drafter(config):
        draft = copy(config.model_config)
        draft.model, draft.trust_remote_code = str(drafter), True
        config.speculative_config = drafting("eagle", draft_model_config=draft, kv_cache_dtype=None)

    folders = [changed(tmp_path, path, set_drafter).folder]
    for text in ("a", "b"):
        (drafter / "modeling.py").write_text(text)
        folders.append(changed(tmp_path, path, set_drafter).folder)
    assert len(set(folders)) == len(folders)


def test_only_files_are_code_whatever_their_names(tmp_path, path):
    """Editors lock a file by a link to nowhere, and a name need not be UTF-8."""
    before = changed(tmp_path, path, set_trusted).folder
    (tmp_path / ".#modeling.py").symlink_to("user@machine.1:2")
    (tmp_path / "folder.py").mkdir()
    assert changed(tmp_path, path, set_trusted).folder == before
    (tmp_path / os.fsdecode(b"\xe9.py")).write_text("a")
    assert changed(tmp_path, path, set_trusted).folder != before


def test_code_that_cannot_be_read_is_refused_by_its_name(tmp_path, path, monkeypatch):
    (tmp_path / "modeling.py").write_text("a")
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(errno.EACCES, "denied", "modeling.py")))
    with pytest.raises(ConfigurationError, match=r"the remote code cannot be read: .*denied: 'modeling\.py'"):
        changed(tmp_path, path, set_trusted)


@pytest.mark.parametrize("kind", ["preprocessor", "video_preprocessor", "processor"])
def test_files_of_a_processor_in_the_folder_are_in_the_namespace(tmp_path, path, kind):
    folders = [changed(tmp_path, path, set_media()).folder]
    before = changed(tmp_path, path)
    for text in ('{"size": 1}', '{"size": 2}'):
        (tmp_path / f"{kind}_config.json").write_text(text)
        folders.append(changed(tmp_path, path, set_media()).folder)
    assert len(set(folders)) == len(folders)
    assert changed(tmp_path, path) == before, "it counts in a model without images"


def test_scales_of_an_encoder_are_known_by_their_file(tmp_path, path):
    def of(name, text):
        (tmp_path / name).write_text(text)
        media = set_media(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / name))
        return changed(tmp_path, path, media).folder

    assert of("scales.json", "{}") != of("scales.json", '{"layer": 1}') == of("moved.json", '{"layer": 1}')


def test_options_are_the_same_in_whatever_order_they_are_given(tmp_path, path):
    def of(*changes):
        return changed(tmp_path, path, *changes).folder

    def adapted(*modules):
        return lambda config: setattr(config, "lora_config", LoRAConfig(max_lora_rank=8, target_modules=[*modules]))

    one = {"video": {"num_frames": 40, "fps": 2}, "image": {"mode": "RGB"}}
    other = {"image": {"mode": "RGB"}, "video": {"fps": 2, "num_frames": 40}}
    assert of(set_media(media_io_kwargs=one)) == of(set_media(media_io_kwargs=other)) != of(set_media())
    assert of(adapted("q_proj", "o_proj")) == of(adapted("o_proj", "q_proj")) != of(adapted("o_proj"))
    overrides = [set_model(model_class_overrides=dict(each)) for each in (["ab", "cd"], ["cd", "ab"], ["ab", "ce"])]
    assert of(overrides[0]) == of(overrides[1]) != of(overrides[2])


@pytest.mark.parametrize("name", ["VLLM_VIDEO_LOADER_BACKEND", "VLLM_MARLIN_INPUT_DTYPE"])
def test_variables_that_no_key_has_are_in_the_namespace(tmp_path, path, monkeypatch, name):
    folders = [changed(tmp_path, path).folder]
    for value in ("one", "other"):
        monkeypatch.setenv(name, value)
        folders.append(changed(tmp_path, path).folder)
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("change", [set_media(), set_model(model_impl="transformers")])
def test_code_of_transformers_is_in_the_namespace_of_a_model_that_computes_with_it(tmp_path, path, monkeypatch, change):
    """Its processors make pixels of an image, of which vLLM hashes the file."""
    before = changed(tmp_path, path, change), changed(tmp_path, path)
    monkeypatch.setattr(metadata, "version", lambda package: f"another {package}")
    assert changed(tmp_path, path, change).folder != before[0].folder
    assert changed(tmp_path, path) == before[1]


def test_folders_are_found_as_before_where_none_of_these_options_is_set(tmp_path, path):
    def set_adapters(config):
        config.lora_config = LoRAConfig(max_lora_rank=8)

    before = changed(tmp_path, path)
    assert not {name for name in before.spelled if "media" in name or "video" in name or "modules" in name}
    assert changed(tmp_path, path, set_adapters) == before
    code = {"transformers": metadata.version("transformers")}
    assert changed(tmp_path, path, set_media()).spelled == before.spelled | code


def weights(model, revision=None, commit=None):
    """Weights of a folder or of a model of a hub."""
    return weights_of(str(model), SimpleNamespace(_commit_hash=commit), revision)


def test_weights_in_a_folder_are_known_by_their_files(tmp_path):
    first, second = tmp_path / "model-1.safetensors", tmp_path / "part" / "model-2.safetensors"
    second.parent.mkdir()
    first.write_bytes(b"1")
    seen = [weights(tmp_path)]
    second.write_bytes(b"2")
    seen.append(weights(tmp_path))
    second.write_bytes(b"22")
    seen.append(weights(tmp_path))
    time = first.stat().st_mtime_ns + 1
    __import__("os").utime(first, ns=(time, time))
    seen.append(weights(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert weights(tmp_path) == seen[-1]
    assert len(set(seen)) == len(seen)


def test_weights_that_are_not_those_of_the_files_need_a_revision(tmp_path, path):
    (tmp_path / "model.pt").write_bytes(b"1")
    of_files = {name: value for name, value in tier(path).items() if name != "revision"}

    def loaded(format, said):
        config = configure(tmp_path, said)
        config.load_config.load_format = format
        return identity(config)

    for format in ("dummy", "tensorizer", "modelexpress", "ipc_cache", "of a plugin"):
        with pytest.raises(ConfigurationError, match=f"load_format '{format}' .* give the tier a revision"):
            loaded(format, of_files)
        assert loaded(format, tier(path))
    assert loaded("auto", of_files) == loaded("safetensors", of_files)


def test_a_commit_of_another_repository_names_no_weights(tmp_path, path):
    """With --hf-config-path, as beside weights in GGUF, the commit that is known is that of the configuration."""
    commit = "0123456789abcdef" * 2 + "01234567"
    said = {name: value for name, value in tier(path).items() if name != "revision"}

    def configured(**fields):
        config = configure(tmp_path, said)
        vars(config.model_config).update({"model": "org/model", **fields})
        config.model_config.hf_config._commit_hash = commit
        return identity(config)

    assert configured() == configured(hf_config_path="org/model")
    with pytest.raises(ConfigurationError, match=r"'org/model' has.*give the tier a revision"):
        configured(hf_config_path="org/configuration")
    assert configured(hf_config_path="org/configuration", revision=commit) == configured()


def test_weights_of_an_address_are_shared_by_users_with_other_caches(tmp_path, path):
    """vLLM copies the configuration from there to a folder below $HOME, and takes this for the model."""

    def pulled(user, address="s3://bucket/model"):
        home = tmp_path / user
        home.mkdir(exist_ok=True)
        config = configure(home, tier(path))
        config.model_config.model_weights = address
        return identity(config)

    assert pulled("one") == pulled("other") != pulled("one", "s3://bucket/another")


def test_a_commit_of_the_configuration_names_no_weights_from_elsewhere(tmp_path, path):
    """With model_weights."""
    commit = "0123456789abcdef" * 2 + "01234567"
    config = configure(tmp_path, {name: value for name, value in tier(path).items() if name != "revision"})
    vars(config.model_config).update(model="org/model", revision=commit)
    config.model_config.hf_config._commit_hash = commit
    assert identity(config)
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigurationError, match=r"'s3://bucket/model' has.*give the tier a revision"):
        identity(config)


def test_weights_of_a_hub_are_known_by_their_commit():
    commit = "0123456789abcdef" * 2 + "01234567"
    assert weights("org/model", commit=commit) == f"commit {commit}"
    assert weights("org/model", revision=commit) == f"commit {commit}"
    assert weights("org/model.gguf", commit=commit) == f"commit {commit}"  # a name like a file's, which is none here
    for revision in (None, "main"):
        with pytest.raises(ConfigurationError, match=r"'org/model' has.*give the tier a revision"):
            weights("org/model", revision=revision)


def test_each_engine_under_data_parallelism_has_a_folder(tmp_path, path):
    folders = [settings_of(configure(tmp_path, tier(path), data_parallel_index=at)).tier.tier.folder for at in (0, 2)]
    assert folders == [str(path), str(path / "engine-2")]


def test_an_order_is_named_whatever_the_number_of_blocks():
    def order(blocks):
        return order_of(torch.zeros(blocks, 2, 4, 16).transpose(1, 2), blocks)

    assert order(8) == order(50) == "float32 0: 2x2 1x4 3x16"
    assert order_of(torch.zeros(2, 8), 2) == "float32 0: 1x8"  # two blocks of one row each, and no K and V
    assert order_of(torch.zeros(2, 16, 4, 3), 8) == "float32 1: 0x2 1x2 2x4 3x3"  # two kernel blocks to a block
    assert order_of([torch.zeros(8, 3), torch.zeros(8, 5, dtype=torch.float16)], 8) == "float32 0: 1x3, float16 0: 1x5"


class Layer(AttentionLayerBase):
    """Attention as vLLM has it on a CPU with these instructions."""

    def __init__(self, instructions):
        self.isa = instructions

    def get_attn_backend(self):
        return AttentionBackend

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def rows_of(instructions="vec"):
    return row_order(one_group(BLOCKS), {"layer.0": "uint8 0: 1x8"}, {"layer.0": Layer(instructions)})


def test_an_order_names_the_instructions_that_a_cpu_packs_its_kv_for():
    """vLLM lays K and V out otherwise where there is AMX, in tensors of the same shape."""
    assert "AttentionBackend vec uint8" in rows_of("vec")
    assert rows_of("vec") == rows_of("vec") != rows_of("amx")


def test_an_order_names_the_forms_of_some_devices(monkeypatch):
    """A byte of fp8 is half as much on some of AMD's as on others, and there KV may be shuffled."""
    orders = [rows_of()]
    monkeypatch.setattr(CpuPlatform, "is_fp8_fnuz", classmethod(lambda cls: True))
    orders.append(rows_of())
    monkeypatch.setattr(CpuPlatform, "is_rocm", lambda platform: True)
    orders.append(rows_of())
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    orders.append(rows_of())
    assert orders[0] != orders[1] == orders[2] != orders[3] != orders[0]


def test_an_order_names_the_architecture_of_a_gpu_and_not_its_model(monkeypatch):
    """An H100 and an H200 have one capability, and run the same kernels."""
    orders = [rows_of()]
    for major, minor in ((9, 0), (10, 0), (9, 0)):
        capability = DeviceCapability(major, minor)
        monkeypatch.setattr(CpuPlatform, "get_device_capability", classmethod(lambda cls, which=capability: which))
        orders.append(rows_of())
    assert orders[0] != orders[1] != orders[2] != orders[0] and orders[1] == orders[3]


# Ranks


def worker_of(config, group=None, caches=None):
    cache_config = one_group(BLOCKS) if group is None else KVCacheConfig(BLOCKS, [], [group])
    worker = WorkerHalf(Settings.of(config, cache_config), config, cache_config)
    worker.register_kv_caches(caches or (plain_caches() if group is None else latent_caches(group)))
    return worker


@pytest.fixture
def together(monkeypatch):
    """Ranks, one after another in this process, that agree with themselves."""

    def agree(problem):
        if problem is not None:
            raise problem

    monkeypatch.setattr(ranks, "agree", agree)
    monkeypatch.setattr(ranks, "share_memory", lambda: True)
    monkeypatch.setattr(regions, "_shared_region", mapping.private)  # how they share it is none of these tests
    monkeypatch.setattr(ranks, "largest", lambda number: number)
    said = []
    monkeypatch.setattr(ranks, "as_on_the_first", lambda value: said.append(value) or said[0])


def test_host_blocks_are_whole_pages_where_there_is_a_tier(tmp_path, path):
    odd = full(layers=3)
    plain = Settings.of(vllm_config(tmp_path, cpu_bytes_to_use=HOST), KVCacheConfig(BLOCKS, [], [odd]))
    assert plain.planner.host_block_bytes % PAGE_BYTES
    assert settings_of(configure(tmp_path, tier(path)), odd).planner.host_block_bytes % PAGE_BYTES == 0


def test_scheduler_and_ranks_have_the_same_number_of_slots(tmp_path, path):
    config = configure(tmp_path, tier(path))
    before = build(config).below.pool.capacity
    worker = worker_of(config)
    (manifest,) = path.glob("*/rank-0-of-1/manifest.json")
    assert json.loads(manifest.read_text())["slots"] == before == build(config).below.pool.capacity
    worker.close()


def test_ranks_with_regions_of_their_own_have_slabs_of_their_own(tmp_path, path, together):
    halves = []
    for rank in range(2):
        size = dict(world_size=2, tensor_parallel_size=2, rank=rank)
        halves.append(worker_of(configure(tmp_path, tier(path), host=HOST, **size)))
    assert sorted(each.name for each in path.glob("*/*")) == ["rank-0-of-2", "rank-1-of-2"]
    for each in halves:
        each.close()


def test_the_first_of_the_ranks_that_share_a_region_has_the_slab(tmp_path, path, together):
    halves = []
    for rank in range(4):
        size = dict(world_size=4, tensor_parallel_size=2, pipeline_parallel_size=2, rank=rank)
        config = configure(tmp_path, tier(path), host=HOST, **size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "as_on_the_first_stage", lambda numbers: numbers)
            patch.setattr(ranks, "place_in_the_group", lambda: (0, 1))  # their shared memory is none of this test
            patch.setattr(ranks, "as_on_the_first_of_the_group", lambda word: word)
            halves.append(worker_of(config, latent()))
    assert sorted(each.name for each in path.glob("*/*")) == ["rank-0-of-2", "rank-1-of-2"]
    assert [isinstance(each._tier, Onlooker) for each in halves] == [False, True, False, True]
    for each in halves:
        each.close()


def test_an_onlooker_reports_everything_as_done_until_it_is_resolved():
    onlooker = Onlooker(3)
    transfers = tuple(TransferPlan(id, Direction.LOAD, (), 0) for id in (4, 5, 6))
    onlooker.run(TierPlan(StepPlan(0, transfers)))
    assert onlooker.report().transfers[:3] == RankReport(3, done=frozenset({4, 5, 6}))[:3]
    onlooker.run(TierPlan(StepPlan(0, (), resolved_below=5, resolved=(6,))))
    assert onlooker.report().transfers.done == {5}
    assert onlooker.report().is_scanned and not onlooker.is_busy


# Tiers that cannot be opened


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(opening, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(opening, "LONGEST_PAUSE_SECONDS", 0.01)


def opens_later(worker, mend):
    """It is there and reports that its tier is not open, until somebody has mended it."""
    assert worker._tier.report().next_generation is None
    worker.begin(StepMetadata(StepPlan(0, ()), tier=TierPlan(StepPlan(0, ()))))
    assert worker.reports().tier[0].next_generation is None
    mend()
    worker._tier._attempts.join(30)
    assert worker._tier.report().next_generation is not None
    worker.close()


def test_a_path_that_is_not_there(tmp_path, path, impatient):
    opens_later(worker_of(configure(tmp_path, tier(path / "nowhere"))), (path / "nowhere").mkdir)


def test_a_path_that_another_process_has(tmp_path, path, impatient):
    config = configure(tmp_path, tier(path))
    worker = worker_of(config)
    opens_later(worker_of(config), worker.close)


def test_another_size_than_before_keeps_what_fits(tmp_path, path):
    worker, first = having_stored(configure(tmp_path, tier(path)))
    worker.close()
    worker = worker_of(configure(tmp_path, tier(path, bytes=9_000_000)))
    loads = TierPlan(StepPlan(0, (moving(0, Direction.LOAD, 1, 5, first),)))
    assert carry_out(worker, loads, {0}).transfers.unfit == ()
    worker.close()


def test_an_error_for_the_operator_leaves_no_region_behind(tmp_path, path, monkeypatch):
    closed, close = [], regions.HostArena.close
    monkeypatch.setattr(regions.HostArena, "close", lambda arena: closed.append(arena) or close(arena))

    def fails(*_, **__):
        raise ConfigurationError("give it another name")

    monkeypatch.setattr(FileTier, "open", fails)
    with pytest.raises(ConfigurationError, match="give it another name"):
        worker_of(configure(tmp_path, tier(path)))
    assert len(closed) == 1


def test_a_refusal_by_another_rank_closes_the_slab_again(tmp_path, path, together, monkeypatch):
    size = dict(world_size=2, tensor_parallel_size=2, rank=0)
    config, calls = configure(tmp_path, tier(path), host=HOST, **size), []

    def agree(parallel, problem):
        calls.append(problem)
        if len(calls) == 2:  # all have the sizes, and one has no slab
            raise ConfigurationError("another rank has no room")

    with monkeypatch.context() as patch:
        patch.setattr(rank_tier, "agree", agree)
        with pytest.raises(ConfigurationError, match="another rank has no room"):
            worker_of(config)
    worker_of(config).close()


def test_a_rank_on_another_machine_makes_its_engines_folder_there(tmp_path, path, together):
    here, there = path / "here", path / "there"
    here.mkdir(), there.mkdir()
    size = dict(world_size=2, tensor_parallel_size=2, data_parallel_index=2)
    first = worker_of(configure(tmp_path, tier(here), host=HOST, rank=0, **size))
    second = worker_of(configure(tmp_path, tier(there), host=HOST, rank=1, **size))
    assert [each.name for each in here.glob("*/*/*")] == ["rank-0-of-2"]
    assert [each.name for each in there.glob("*/*/*")] == ["rank-1-of-2"]
    first.close()
    second.close()


def test_rows_in_another_order_begin_anew(tmp_path, path, caplog):
    config = configure(tmp_path, tier(path))
    worker, first = having_stored(config)
    worker.close()
    turned = {name: view.transpose(1, 2).contiguous().transpose(1, 2) for name, view in plain_caches().items()}
    worker = worker_of(config, caches=turned)
    loads = TierPlan(StepPlan(0, (moving(0, Direction.LOAD, 1, 5, first),)))
    assert [slots for _, slots in carry_out(worker, loads, {0}).transfers.unfit] == [(1,)]
    assert caplog.text.count("begins anew") == 1 and "row order was" in caplog.text
    worker.close()


# A worker's steps


def carry_out(worker, plan, ids):
    """Until these transfers have ended: the last report of the tier."""
    worker.begin(StepMetadata(StepPlan(0, ()), tier=plan))
    while True:
        worker.results()
        reports = worker.reports()
        ended = reports.tier[0].transfers
        if ids <= ended.done | ended.failed:
            return reports.tier[0]
        worker.begin(StepMetadata(StepPlan(0, ()), tier=TierPlan(StepPlan(0, ()))))


def having_stored(config):
    """A worker that has written slot 1, and the generation of that."""
    worker = worker_of(config)
    first = worker._tier.report().next_generation
    carry_out(worker, TierPlan(StepPlan(0, (moving(0, Direction.STORE, 1, 3, first),))), {0})
    return worker, first


def moving(id, direction, slot, block, generation, group=0):
    label = Label(KEY, b"", group, 0, CHUNK, generation)
    copies = (GroupCopy(group, (slot,), (block,), (label,)),)
    return TransferPlan(id, direction, copies, PAGE_BYTES)


def test_a_worker_writes_what_its_host_block_holds_and_reads_it_back(tmp_path, path):
    worker = worker_of(configure(tmp_path, tier(path)))
    region = worker._worker._arena.blocks
    region[3] = torch.arange(region.shape[1]) % 251
    first = worker._tier.report().next_generation
    store = TierPlan(StepPlan(0, (moving(0, Direction.STORE, 9, 3, first),)))
    assert carry_out(worker, store, {0}).transfers.done == {0}
    loads = moving(1, Direction.LOAD, 9, 5, first), moving(2, Direction.LOAD, 8, 6, first)
    report = carry_out(worker, TierPlan(StepPlan(0, loads, resolved_below=1)), {1, 2})
    assert (report.transfers.done, [slots for _, slots in report.transfers.unfit]) == ({1, 2}, [(8,)])
    assert torch.equal(region[5], region[3])
    moved = worker.take_stats().data
    assert moved["tiering_write_bytes"] == moved["tiering_read_bytes"] == region.shape[1]
    assert moved["tiering_write_time"] > 0 < moved["tiering_read_time"]
    worker.close()


def test_groups_that_a_stage_lacks_are_written_as_zeros(tmp_path, path):
    """So its records name whole chunks, and nothing of others gets to the disk."""
    config = configure(tmp_path, tier(path))
    caches = KVCacheConfig(BLOCKS, [], [full(), window(8)])
    settings = Settings.of(config, caches)
    region = torch.full((64, settings.planner.host_block_bytes), 7, dtype=torch.uint8)
    pieces = list(settings.planner.pieces)
    lacking = regions.RankShapes(
        (pieces[0], pieces[1].__class__(pieces[1].group, 1, pieces[1].host_blocks, 0)), region.shape[1]
    )
    opened = rank_tier.tier_of_rank(settings, config.parallel_config, lacking, region, "some order")
    first = opened.report().next_generation
    opened.run(TierPlan(StepPlan(0, (moving(0, Direction.STORE, 1, 3, first, group=1),))))
    opened.drain()
    assert opened.report().transfers.done == {0}
    assert not region[3].any() and region[4].all()
    opened.close()


def test_a_reset_on_a_disk_that_is_read_only_does_not_end_the_worker(tmp_path, path, monkeypatch):
    """No mark can be left, so nothing is written or served any more; and once it can be, all goes on."""

    def read_only(*_):
        raise OSError(errno.EROFS, "the disk is read-only")

    worker, first = having_stored(configure(tmp_path, tier(path)))
    later = first + (1 << 32)
    transfers = moving(1, Direction.STORE, 2, 3, later), moving(2, Direction.LOAD, 1, 5, first)
    with monkeypatch.context() as broken:
        for call in ("fsync", "unlink", "pwrite", "pwritev"):
            broken.setattr(os, call, read_only)
        report = carry_out(worker, TierPlan(StepPlan(1, transfers), first_generation=later), {1, 2})
    assert report.transfers.failed == {1} and [slots for _, slots in report.transfers.unfit] == [(1,)]
    assert not list(path.rglob(MARK))
    again = TierPlan(StepPlan(1, (moving(3, Direction.STORE, 2, 3, later),)), first_generation=later)
    assert 3 in carry_out(worker, again, {3}).transfers.done and list(path.rglob(MARK))
    worker.close()


def test_a_reset_leaves_a_mark_for_the_next_start(tmp_path, path):
    config = configure(tmp_path, tier(path))
    worker, first = having_stored(config)
    assert not list(path.rglob(MARK))
    later = first + (1 << 32)
    carry_out(worker, TierPlan(StepPlan(1, (moving(1, Direction.STORE, 2, 3, later),)), first_generation=later), {1})
    assert list(path.rglob(MARK))
    worker.close()
    worker = worker_of(config)
    assert not list(path.rglob(MARK))
    loads = moving(0, Direction.LOAD, 1, 5, first), moving(1, Direction.LOAD, 2, 6, later)
    refused = carry_out(worker, TierPlan(StepPlan(0, loads)), {0, 1}).transfers.unfit
    assert sorted(slot for _, slots in refused for slot in slots) == [1, 2]
    worker.close()


def test_slots_that_a_worker_has_found_are_reported_until_taken_in(tmp_path, path):
    config = configure(tmp_path, tier(path))
    worker, _ = having_stored(config)
    worker.close()
    worker = worker_of(config)
    worker._tier.tier._source.close()  # which waits for it

    def says(taken):
        """In a step that computes."""
        plan = TierPlan(StepPlan(0, ()), taken=taken)
        worker.begin(StepMetadata(StepPlan(0, ()), computes=True, tier=plan))
        worker.results()
        reports = worker.reports()
        return reports and len(reports.tier[0].found)

    assert [says(0), says(0), says(1), says(1)] == [1, 1, 0, None]
    worker.close()


def test_reports_of_ranks_are_put_together():
    one, other = (TierReport(RankReport(rank)) for rank in range(2))
    both = WorkerReports((one.transfers,), 5, (one,)).aggregate(WorkerReports((other.transfers,), 5, (other,)))
    assert both == WorkerReports((one.transfers, other.transfers), 5, (one, other))
