"""Adapters whose files are replaced under their path: their keys are the same, and their KV is not."""

import json

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from connector.vllm import adapters
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, RealEngine, differences

PROMPT, OTHER = PROMPTS[:2]
ALL = BLOCKS * BLOCK
LORA = dict(enable_lora=True, max_lora_rank=8, max_loras=1, max_cpu_loras=1)


def save(folder, seed):
    """An adapter that changes K and V of all layers, in place of what was there."""
    config = json.loads((folder_of("llama") / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name in ("k_proj", "v_proj"):
            to = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{to}.lora_A.weight"] = torch.randn(8, config["hidden_size"], generator=draw) / 8
            tensors[f"{to}.lora_B.weight"] = torch.randn(width, 8, generator=draw) / 8
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = dict(peft_type="LORA", r=8, lora_alpha=64, target_modules=["k_proj", "v_proj"], bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(described))


def adapter(folder, **more):
    return LoRARequest(folder.name, 1, str(folder), **more)


def answer(engine, prompt, of):
    name = engine.submit(prompt, adapter=of)
    engine._step_while(engine.llm.llm_engine.has_unfinished_requests)
    engine.rest()
    return engine.finished.pop(name)


def expected(folder):
    with RealEngine(folder_of("llama"), **LORA) as engine:
        return answer(engine, PROMPT, adapter(folder))


@pytest.mark.parametrize("is_looked_at", [True, False], ids=["looked at", "control"])
def test_an_adapter_that_was_replaced_in_its_place_loads_nothing_of_the_old_one(tmp_path, monkeypatch, is_looked_at):
    monkeypatch.setattr(adapters, "WAIT", 60)  # a machine that is busy is no mount that hangs
    sql, chat = tmp_path / "sql", tmp_path / "chat"
    save(sql, 1), save(chat, 2)
    old = expected(sql)
    with CachedEngine(folder_of("llama"), offload="eager", reset="with_connector", engine=LORA) as engine:
        if not is_looked_at:
            monkeypatch.setattr(engine.half._adapters, "are_same", lambda request, adapter: True)
        assert answer(engine, PROMPT, adapter(sql)).loaded_tokens == 0
        engine.forget()
        same = answer(engine, PROMPT, adapter(sql))
        assert same.loaded_tokens == ALL and max(differences([same], [old])) <= TOLERANCE
        save(sql, 3)
        engine.llm.llm_engine.add_lora(adapter(sql, load_inplace=True))
        engine.forget()  # vLLM's own keys are the same, too
        replaced = answer(engine, PROMPT, adapter(sql))
        base = answer(engine, OTHER, None)
        engine.forget()
        assert answer(engine, OTHER, None).loaded_tokens == ALL, "of others everything is loaded"
        again = answer(engine, PROMPT, adapter(sql))
        engine.forget(host=True)
        fresh = answer(engine, PROMPT, adapter(sql))
        engine.forget()
        after = answer(engine, PROMPT, adapter(sql))
        engine.check_nothing_leaked()
    new = expected(sql)
    assert differences([new], [old])[0] > 1
    if not is_looked_at:
        assert replaced.loaded_tokens == ALL and differences([replaced], [new])[0] > TOLERANCE
        return
    assert [each.loaded_tokens for each in (replaced, again, fresh, after)] == [0, 0, 0, ALL]
    assert max(differences([replaced, again, fresh, after], [new] * 4)) <= TOLERANCE
    assert base.cached_tokens == 0
