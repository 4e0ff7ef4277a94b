"""Every kind of causal model that transformers has, small and random, beside `model.generate`.

Each is built from its configuration's defaults with small sizes. Three prompts are answered by `generate` with a past
of a HostPrefixCache, the device forgets them, and they are repeated: then they come from the host. The tokens must be
those of `generate` without it, and the logits of every step within 1e-4 of their deviation (a refusal gives its reason
in a sentence of its own). Windows have 32 tokens, prompts 100 and more.

    right        cold and hit are as `generate`
    refused      ConfigurationError when the cache is made
    wrong        anything else: other tokens, other logits, no hit, an exception
    not built    the defaults cannot be made small by common names; nothing is known

Printed is the table of results/transformers_families.txt; the exit code is 1 if a family is wrong.

    PYTHONPATH=examples python -m benchmarks.engines.transformers_families [--families llama,mamba] [--verbose]
"""

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import LogitsProcessor, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from connector.transformers import HostPrefixCache
from cpu_prefix_cache import ConfigurationError
from random_models import initialise

VOCABULARY = 320
LENGTH = 512
WINDOW = 32
LAYERS = 4
NEW_TOKENS = 8
LARGEST = 30_000_000  # parameters
TOLERANCE = 1e-4
PROMPTS = (105, 109, 120)
RIGHT = "right"
REFUSED = "refused"
WRONG = "wrong"
NOT_BUILT = "not built"

# Sizes by the names that configurations have for them.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), LENGTH),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 128
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("head_dim", "swa_head_dim", "attention_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 16),
    "swa_num_attention_heads": 4,
    "v_head_dim": 16,
    "qk_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 16,
    "lru_width": 64,
    "shared_intermediate_size": 64,
    "mamba_chunk_size": 32,
    "chunk_size": 32,
    "is_decoder": True,
}
# Latent attention: heads are as wide as their rotated part, and all have keys of their own.
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id"))
# Needs of these beside it.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
    "blenderbot": {"encoder_no_repeat_ngram_size": 0},
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "cwm": {"bos_token_id": 0},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_kv_shared_layers": 4,
        "activation_sparsity_pattern": [0.0] * 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "mpt": {"use_cache": True},
    "modernbert-decoder": dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), VOCABULARY - 1),
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zamba": {
        "num_hidden_layers": 9,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "num_query_groups": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}


@dataclass(frozen=True, slots=True)
class Result:
    """Findings on one family."""

    family: str
    verdict: str
    reason: str = ""


class Recorder(LogitsProcessor):
    """Keeps the logits of every step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores[0].clone())
        return scores


def families() -> Iterator[str]:
    """The kinds of models that AutoModelForCausalLM makes; of one that takes images or sound its text part alone."""
    for family, config in CONFIG_MAPPING.items():
        if config in MODEL_FOR_CAUSAL_LM_MAPPING and "text_config" not in config.sub_configs:
            yield family


def build(family: str) -> PreTrainedModel:
    """A small random model."""
    kind = CONFIG_MAPPING[family]
    usual = kind().to_dict()
    names = usual.keys() | kind.attribute_map.keys()
    sizes = {name: size for name, size in SMALL.items() if name in names}
    if "qk_rope_head_dim" in names:
        sizes |= {name: size for name, size in LATENT.items() if name in sizes}
    kinds = list(dict.fromkeys(usual.get("layer_types") or ()))
    if len(kinds) > 1:  # each of them
        sizes["layer_types"] = (kinds * LAYERS)[:LAYERS]
    others = {name: value for name, value in NO_SPECIAL_TOKENS.items() if name in usual}
    config = kind(**{**sizes, **others, **MORE.get(family, {})})
    made = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    made = made[0] if isinstance(made, tuple) else made
    with torch.device("meta"):
        parameters = sum(each.numel() for each in made(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters")
    torch.manual_seed(0)
    model = made(config).eval()
    initialise(model)
    return model


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answered(model: PreTrainedModel, ids: list[int], **options: Any) -> tuple[list[int], torch.Tensor]:
    """The tokens of `generate`, and the logits of every step."""
    recorder = Recorder()
    answer = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=[recorder],
        **options,
    )
    return answer[0, len(ids) :].tolist(), torch.stack(recorder.seen)


def error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """How far apart they are, in deviations of the reference. Tokens that may not come have -inf in both."""
    possible = reference.isfinite()
    if not possible.equal(logits.isfinite()):
        return float("inf")
    return float((logits - reference)[possible].abs().max() / reference[possible].std())


def compare(cache: HostPrefixCache) -> str:
    """Returns the first difference; an empty text if there is none."""
    prompts = {seed: prompt(seed, length) for seed, length in enumerate(PROMPTS)}
    references = {seed: answered(cache.model, ids) for seed, ids in prompts.items()}
    for time in ("cold", "hit"):
        for seed, ids in prompts.items():
            with cache.past(ids) as past:
                tokens, logits = answered(cache.model, ids, past_key_values=past)
            off = error(logits, references[seed][1])
            if tokens != references[seed][0] or not off <= TOLERANCE:
                return f"{time}: logits off by {off:.1e} deviations"
            if past.device_hit_tokens or (past.hit_tokens > 0) != (time == "hit"):
                return f"{time}: {past.hit_tokens} tokens found, {past.device_hit_tokens} of them on the device"
        cache.forget_device()
    return ""


def judge(family: str) -> Result:
    try:
        model = build(family)
        answered(model, prompt(0, PROMPTS[0]))
    except Exception as error:
        return Result(family, NOT_BUILT, f"{type(error).__name__}: {error}")
    try:
        cache = HostPrefixCache(model, host_bytes="64MiB", offload="eager", max_model_len=LENGTH - NEW_TOKENS)
    except ConfigurationError as error:
        return Result(family, REFUSED, str(error).replace(type(model).__name__, "it"))
    except Exception as error:
        return Result(family, WRONG, f"{type(error).__name__}: {error}")
    with cache:
        try:
            wrong = compare(cache)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
    return Result(family, WRONG if wrong else RIGHT, wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="some of them, with commas")
    parser.add_argument("--verbose", action="store_true", help="print each one with its whole reason")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = options.families.split(",") if options.families else list(families())
    results = []
    for family in tqdm(chosen, disable=None):
        results.append(judge(family))
        if options.verbose:
            tqdm.write(f"{results[-1].family:30} {results[-1].verdict:10} {results[-1].reason[:300]}")
    print(table(results))
    return int(any(each.verdict == WRONG for each in results))


def table(results: list[Result]) -> str:
    """Families by verdict; those that are refused by the sentence, without the names and numbers in it."""
    lines = [f"| transformers {transformers.__version__} | families | |", "|---|---|---|"]
    for verdict in (RIGHT, REFUSED, WRONG, NOT_BUILT):
        reasons: dict[str, list[str]] = {}
        for each in results:
            if each.verdict == verdict:
                reason = "" if verdict == NOT_BUILT else re.sub(r"layer \d+|\d\.\de[-+]\d+", "…", each.reason)
                reasons.setdefault(reason.split("; supported")[0], []).append(each.family)
        lines += [f"| {verdict} | {len(names)}: {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
