"""nano-vllm on a CPU: its scheduler, block manager and model as they are, with stand-ins for what needs a GPU.

    triton, flash_attn       modules of ours: attention by torch, over blocks of NaN until they are written
    Tensor.cuda              the tensor
    torch.tensor             without pinned memory
    weights                  random, so that an answer depends on the past
    sampling                 greedy; the logits of the last step are kept

The engine must be on the path. Importing this replaces parts of it.
"""

import importlib.util
import os
import sys
import tempfile
import types

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen3Config

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 64, 4, 2, 16, 512


def _module(name, **members):
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(members)
    return module


def _attention(query, key, value, scale):
    """Causal, with the last query at the last key. Rows are tokens."""
    queries, keys, shared = len(query), len(key), query.shape[1] // key.shape[1]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    heads = (each.transpose(0, 1)[None] for each in (query, *(kv.repeat_interleave(shared, 1) for kv in (key, value))))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def _of_blocks(cache, table, tokens):
    blocks = cache[table[: -(-tokens // cache.shape[1])].long()]
    return blocks.flatten(0, 1)[:tokens]


def _prefill(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, block_table=None):
    """flash_attn_varlen_func: sequences one behind the other, or their KV in blocks."""
    answers = []
    for at in range(len(cu_seqlens_q) - 1):
        begin, end = (int(cu_seqlens_k[at + more]) for more in (0, 1))
        if block_table is None:
            key, value = k[begin:end], v[begin:end]
        else:
            key, value = (_of_blocks(cache, block_table[at], end - begin) for cache in (k, v))
        answers.append(_attention(q[int(cu_seqlens_q[at]) : int(cu_seqlens_q[at + 1])], key, value, softmax_scale))
    return torch.cat(answers)


def _decode(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal):
    """flash_attn_with_kvcache: a token of each sequence."""
    answers = []
    for query, table, tokens in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        key, value = (_of_blocks(cache, table, tokens) for cache in (k_cache, v_cache))
        answers.append(_attention(query, key, value, softmax_scale))
    return torch.stack(answers)


def _store(key, value, k_cache, v_cache, slot_mapping):
    kept = slot_mapping >= 0
    for new, cache in ((key, k_cache), (value, v_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping[kept].long()] = new[kept]


class _TorchWithoutPins(types.ModuleType):
    def __getattr__(self, name):
        return getattr(torch, name)

    def tensor(self, *values, pin_memory=False, **options):
        return torch.tensor(*values, **options)


if importlib.util.find_spec("triton") is None:
    _module("triton", jit=lambda function: function, language=_module("triton.language", constexpr=int))
_module("flash_attn", flash_attn_varlen_func=_prefill, flash_attn_with_kvcache=_decode)
torch.Tensor.cuda = lambda self, **options: self

# the engine, which imports those
from nanovllm.engine import model_runner  # noqa: E402
from nanovllm.engine.llm_engine import LLMEngine  # noqa: E402
from nanovllm.engine.model_runner import ModelRunner  # noqa: E402
from nanovllm.engine.scheduler import Scheduler  # noqa: E402
from nanovllm.engine.sequence import Sequence  # noqa: E402
from nanovllm.layers import attention  # noqa: E402
from nanovllm.models.qwen3 import Qwen3ForCausalLM  # noqa: E402
from nanovllm.sampling_params import SamplingParams  # noqa: E402

__all__ = ["CPURunner", "LLMEngine", "SamplingParams", "Scheduler", "Sequence"]

attention.store_kvcache = _store
model_runner.torch = _TorchWithoutPins("torch")
if not dist.is_initialized():
    folder = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", world_size=1, rank=0)


def _model():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            intermediate_size=2 * HIDDEN,
            vocab_size=VOCABULARY,
            max_position_embeddings=8192,
            attention_bias=False,
            tie_word_embeddings=False,
        )
    )
    for name, weights in model.named_parameters():
        if "norm" in name:
            weights.data.fill_(1.0)
        else:
            weights.data.normal_(0, 0.6 if "o_proj" in name else 0.25)  # the past counts for much
    for layer in model.model.layers:
        layer.self_attn.attn.scale = 0.5  # and single tokens of it
    return model


MODEL = _model()


class CPURunner(ModelRunner):
    """The engine's runner with its own preparation of steps. `logits` are those of the last one."""

    def __init__(self, config):
        self.config, self.block_size, self.enforce_eager = config, config.kvcache_block_size, True
        self.world_size, self.rank = 1, 0
        self.model, self.sampler, self.logits = MODEL, self._greedy, []
        blocks = (config.num_kvcache_blocks, self.block_size, KV_HEADS, HEAD_DIM)
        self.kv_cache = torch.full((2, LAYERS, *blocks), float("nan"))

    def prepare_block_tables(self, seqs):
        longest = max(len(seq.block_table) for seq in seqs)
        padded = [seq.block_table + [-1] * (longest - len(seq.block_table)) for seq in seqs]
        return torch.tensor(padded, dtype=torch.int32)

    def run(self, seqs, is_prefill):
        for layer, key, value in zip(MODEL.model.layers, *self.kv_cache, strict=True):
            layer.self_attn.attn.k_cache, layer.self_attn.attn.v_cache = key, value
        with torch.inference_mode():
            return super().run(seqs, is_prefill)

    def _greedy(self, logits, temperatures):
        self.logits = logits
        return logits.argmax(-1)
