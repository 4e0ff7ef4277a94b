"""Tiny models for tests with a real vLLM engine, with random weights in which the past matters.

With load_format="dummy" a Llama gives the same answer whatever its cache holds. Here damage shows wherever it is: noise
in any one block of a prompt of 1,000 tokens moves the logprobs by 8 % of their deviation or more, and in one layer of
it by 2 %. That needs attention that looks at several tokens. With a SHARPNESS of 3 it looks at so few that some blocks
count for less than what the tests tolerate.

    embeddings     N(0, 1), as the first layer sees them; not tied to the output
    matrices       N(0, 1 / fan_in); what makes queries and keys SHARPNESS times that
    norms          1, or 0 where the model adds 1: as they are; those of queries and keys, which undo the
                   above, SHARPNESS instead of 1
    A_log          log FORGETTING: of its state, a linear layer forgets half in 100 tokens. As transformers initialises
                   it, after 5 tokens nothing is left, and damage shows nowhere
"""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

VOCABULARY = 1000
MAX_MODEL_LEN = 4096
WINDOW = 64  # tokens that a window layer of Gemma 3 sees
LOCAL_CHUNK = 128  # tokens of a chunk of Llama 4
SHARPNESS = 1.5
GATED_SHARPNESS = 2  # where one layer in four has attention, and that behind a gate
GATED = ("qwen3_next", "qwen3_5_text")
FORGETTING = 0.005

SHARPENED = ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=MAX_MODEL_LEN,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
WINDOWS = dict(  # two layers with a window, one with full attention, and the same again
    num_hidden_layers=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    sliding_window=WINDOW,
)


def some_tokens(count: int, seed: object) -> list[int]:
    """A prompt that is the same for the same seed."""
    return random.Random(str(seed)).choices(range(VOCABULARY), k=count)


def save_llama(folder: Path, seed: int = 0) -> Path:
    return _save(LlamaForCausalLM, LlamaConfig(**SIZES, num_hidden_layers=4), folder, seed)


def save_qwen3(folder: Path, seed: int = 0) -> Path:
    return _save(Qwen3ForCausalLM, Qwen3Config(**SIZES, num_hidden_layers=4), folder, seed)


def save_long_llama(folder: Path, seed: int = 0) -> Path:
    """A model of one small layer, for prompts of 64K tokens."""
    small = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2**17)
    return _save(LlamaForCausalLM, LlamaConfig(**SIZES | small, num_hidden_layers=1), folder, seed)


def save_gemma3(folder: Path, seed: int = 0) -> Path:
    config = Gemma3TextConfig(**SIZES, **WINDOWS, query_pre_attn_scalar=SIZES["head_dim"])
    return _save(Gemma3ForCausalLM, config, folder, seed)


def save_gemma4(
    folder: Path, head_dim: int = 32, global_head_dim: int = 64, *, sharing: int = 0, seed: int = 0
) -> Path:
    """Heads of another size under full attention: its blocks are of another length then. So many of the last layers
    are `sharing` the KV of earlier ones, as half of the small models' do.
    """
    config = transformers.Gemma4TextConfig(
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        **WINDOWS,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=sharing,
        attention_k_eq_v=False,
        final_logit_softcapping=None,
    )
    return _save(transformers.Gemma4ForCausalLM, config, folder, seed)


def save_llama4(folder: Path, seed: int = 0) -> Path:
    """Three layers of chunked-local attention, and one that sees all tokens."""
    config = transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=SIZES["intermediate_size"],
        num_hidden_layers=4,
        no_rope_layer_interval=4,
        attention_chunk_size=LOCAL_CHUNK,
        interleave_moe_layer_step=10,  # no layer has experts
        num_local_experts=2,
    )
    return _save(transformers.Llama4ForCausalLM, config, folder, seed)


def save_eagle(folder: Path, sizes: Mapping[str, Any] = SIZES, dtype: str = "float32", seed: int = 7) -> Path:
    """A drafter of one layer for a model of these sizes: it has its embeddings, and reads its last hidden states."""
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, num_hidden_layers=1, architectures=["LlamaForCausalLM"], dtype=dtype)
    model = LlamaForCausalLM(config)
    initialise(model)
    config.save_pretrained(folder)
    parts = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
    layers = {name: weight for name, weight in parts.items() if name.startswith("layers.") and "input_" not in name}
    layers["fc.weight"] = joining(config.hidden_size)  # vLLM leaves out the norm before the first layer
    save_file({name: weight.to(config.dtype) for name, weight in layers.items()}, folder / "model.safetensors")
    return folder


def joining(hidden: int) -> torch.Tensor:
    """The matrix by which a drafter joins an embedding and a hidden state."""
    return torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5


WORDS_OF_IMAGES = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE = VOCABULARY - len(WORDS_OF_IMAGES)  # the token that an image of IMAGE_SIDE pixels squared stands for
IMAGE_SIDE = 64
PATCH = 8
SHUFFLED = 2
IMAGE_TOKENS = (IMAGE_SIDE // PATCH // SHUFFLED) ** 2


def save_idefics3(folder: Path, seed: int = 0) -> Path:
    """A Llama that sees images, with all that makes tokens of them. It needs no torchvision, as most others do."""
    config = transformers.Idefics3Config(
        text_config=LlamaConfig(**SIZES, num_hidden_layers=4),
        vision_config=dict(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=IMAGE_SIDE,
            patch_size=PATCH,
        ),
        scale_factor=SHUFFLED,
        image_token_id=IMAGE,
        pad_token_id=0,
    )
    tokenizer = save_words(folder, WORDS_OF_IMAGES)
    side = {"longest_edge": IMAGE_SIDE}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=side, max_image_size=side)
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS).save_pretrained(folder)
    return _save(transformers.Idefics3ForConditionalGeneration, config, folder, seed)


def save_words(folder: Path, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the models know, the last of them these."""
    all_words = [f"word{number}" for number in range(VOCABULARY - len(words))] + list(words)
    known = WordLevel({word: number for number, word in enumerate(all_words)}, unk_token=all_words[0])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(known), unk_token=all_words[0], additional_special_tokens=list(words)
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


MODELS = {"llama": save_llama, "qwen3": save_qwen3, "gemma3": save_gemma3}


def _save(architecture, config, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = architecture(config)
    initialise(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def initialise(model: PreTrainedModel) -> None:
    """Gemma multiplies its embeddings by the root of their length. Whether a model adds 1 to the weights of its norms
    shows in those that transformers gives them, which are 0 then.
    """
    gemma = model.config.model_type in ("gemma3_text", "gemma4_text")
    sharpness = GATED_SHARPNESS if model.config.model_type in GATED else SHARPNESS
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(std=model.config.hidden_size**-0.5 if gemma else 1)
        elif weight.dim() >= 2 and "conv" not in name:
            gain = sharpness if any(part in name for part in SHARPENED) else 1
            weight.normal_(std=gain * weight.shape[-1] ** -0.5)
        elif name.endswith("A_log"):
            weight.fill_(math.log(FORGETTING))
        elif "q_norm" in name or "k_norm" in name:
            weight.add_(sharpness - 1)
