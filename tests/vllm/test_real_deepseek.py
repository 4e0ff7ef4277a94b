"""DeepSeek V4.1-Flash by vLLM's own layers: their KV is that of deepseek.py, and a GiB holds as much.

An engine of this model does not run on a CPU: `DeepseekV4 attention requires a CUDA device` (vLLM 0.32). One with tiny
weights and the KV of the real model is made as far as that, with this check left out, in a process of its own. It has
vLLM's first model runner, without which there is no Triton, so its windows are kept (`--no-swa-bounded-replay`).
"""

import pickle
from collections import Counter

import pytest

from connector.vllm.groups import planner_for
from cpu_prefix_cache.deciding import conversation_bytes
from tests.vllm.deepseek import BLOCK, v41_flash
from tests.vllm.engine import vllm_config
from tests.vllm.planning import kv_cache_configs
from tests.vllm.test_plugin import python_in

GIB = 2**30
ENGINE = """
import json, pickle
from pathlib import Path
import vllm.models.deepseek_v4.nvidia.ops.o_proj as projection
from vllm import LLM
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

projection.compute_fp8_einsum_recipe = lambda *args, **options: ((1, 128, 128), False)
SOURCES = [2, 8, 14, 20]
TINY = dict(hidden_size=512, num_attention_heads=8, q_lora_rank=128, o_lora_rank=128, o_groups=2, index_n_heads=8)
TINY |= dict(index_topk=64, moe_intermediate_size=256, n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=2)
TINY |= dict(intermediate_size=512, vocab_size=1024, hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=4, n_group=1)
TINY |= dict(topk_group=1, scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True, swiglu_limit=10.0)
TINY |= dict(routed_scaling_factor=1.5, num_hash_layers=1, rms_norm_eps=1e-6, hidden_act="silu", expert_dtype="fp8")
TINY |= dict(torch_dtype="bfloat16", tie_word_embeddings=False, max_position_embeddings=4096, rope_theta=10000.0)
SCALED = dict(factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=1024)
TINY |= dict(rope_scaling=SCALED | dict(type="yarn"), compress_rope_theta=160000.0, num_nextn_predict_layers=0)
TINY |= dict(rope_parameters=SCALED | dict(rope_type="yarn", rope_theta=10000.0), first_k_dense_replace=0)
REAL = dict(num_hidden_layers=40, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
REAL |= dict(compress_ratios=[0] * 2 + [2] * 18 + [1] * 20, sliding_window=128, kv_lora_rank=512)
REAL |= dict(kv_source_layer_ids=SOURCES, index_source_layer_ids=SOURCES)

class Done(Exception):
    pass

specs_of = GPUModelRunner.get_kv_cache_spec

def dump(runner):
    runner.vllm_config.cache_config.block_size = 256
    Path("specs").write_bytes(pickle.dumps(specs_of(runner)))
    raise Done

GPUModelRunner.get_kv_cache_spec = dump

if __name__ == "__main__":
    Path("model").mkdir()
    config = dict(architectures=["DeepseekV41ForCausalLM"], model_type="deepseek_v41", text_config=TINY | REAL)
    Path("model/config.json").write_text(json.dumps(config | dict(vision_config={})))
    try:
        LLM(model="model", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
            limit_mm_per_prompt={"image": 0}, kv_cache_dtype="fp8_ds_mla", dtype="bfloat16", block_size=256,
            kv_cache_memory_bytes=2**28)
    except Done:
        pass
"""
IN_ONE_PROCESS = 'import os\nos.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"\n'


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """Specs of all layers of the engine."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine.py").write_text(IN_ONE_PROCESS + ENGINE)
    ran = python_in(folder, "engine.py")
    assert (folder / "specs").is_file(), ran.stderr[-3000:]
    return pickle.loads((folder / "specs").read_bytes())


@pytest.mark.slow
def test_the_layers_are_those_that_other_tests_have(specs):
    def shapes(of):
        return Counter((type(spec), spec.block_size, spec.page_size_bytes, spec.real_page_size_bytes) for spec in of)

    assert len(specs) == 51 and shapes(specs.values()) == shapes(v41_flash(replays=False).values())


@pytest.mark.slow
def test_a_gib_holds_as_many_tokens(tmp_path, specs):
    config = vllm_config(tmp_path, max_model_len=131_072, cpu_bytes_to_use=1)
    config.cache_config.kv_cache_layout = "BLNHC"
    config.cache_config.block_size = BLOCK
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    [caches] = kv_cache_configs(config, [specs], 8 * GIB)
    planner = planner_for(config, caches)
    tokens = [GIB * length // conversation_bytes(planner, length) for length in (8_192, 32_768, 131_072)]
    assert tokens == [477_815, 562_136, 588_081]
