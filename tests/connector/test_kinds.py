"""README's table of kinds, for models of transformers: what each of its kinds of layers keeps, and who takes it."""

from transformers import cache_utils

from connector.transformers import layers
from tests.support.kinds import KEPT, column, outcome

KINDS = {
    "full attention": {"full_attention"},
    "MLA": {"full_attention"},  # its latent
    "MLA with an indexer, or of compressed tokens": {"indexed_attention"},
    "sliding windows": {"sliding_attention"},
    "chunked-local attention": {"chunked_attention"},
    "states: Mamba, linear attention, convolutions": {"linear_attention", "conv", "hybrid"},
    "a window and states in one layer": {"hybrid_sliding"},
}
NOTHING = {"moe", "mlp", "dummy"}  # layers without a past


def taken(kind: str) -> bool:
    layer = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[kind](sliding_window=9)
    has_states = isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
    return layers.attention_of("the layer", layer, kind) is not None or has_states


def test_the_table_has_what_a_past_takes():
    found = {row: {outcome(lambda kind=kind: taken(kind)) for kind in kinds} for row, kinds in KINDS.items()}
    assert {row: {cell} for row, cell in column("transformers").items()} == found


def test_the_table_has_all_kinds_of_layers_that_there_are():
    assert {*cache_utils.DYNAMIC_LAYER_TYPE_MAPPING} <= NOTHING.union(*KINDS.values())


def test_a_kind_that_is_taken_no_more_would_be_noticed(monkeypatch):
    monkeypatch.setattr(layers, "DynamicSlidingWindowLayer", type(None))
    assert column("transformers")["sliding windows"] == KEPT != outcome(lambda: taken("sliding_attention"))
