"""A model small enough to compare every logit: two layers of attention that read and write KV through a block table."""

import torch


class TinyModel:
    """Random weights. Its KV is [K and V, layers, blocks, block_tokens, width], and nothing but NaN at first."""

    layers = 2
    width = 8
    vocabulary = 50

    def __init__(self, num_blocks, block_tokens):
        draw = torch.Generator().manual_seed(0)
        random = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        self.block_tokens = block_tokens
        self.embedding, self.position = random(self.vocabulary, self.width), random(4096, self.width)
        self.weights = random(self.layers, 3, self.width, self.width)
        self.kv = torch.full((2, self.layers, num_blocks, block_tokens, self.width), torch.nan, dtype=torch.float64)

    def forward(self, tokens, start, table):
        """Compute `tokens[start:]` of a request. The logits of its last token, [vocabulary]."""
        positions = torch.arange(len(tokens))
        block, slot = torch.tensor(table)[positions // self.block_tokens], positions % self.block_tokens
        hidden = self.embedding[tokens[start:]] + self.position[start : len(tokens)]
        for layer, weights in enumerate(self.weights):
            query, key, value = torch.einsum("tw,iwv->itv", hidden.tanh(), weights)
            keys, values = self.kv[:, layer]
            keys[block[start:], slot[start:]], values[block[start:], slot[start:]] = key, value
            scores = query @ keys[block, slot].T / self.width
            scores.masked_fill_(positions > positions[start:, None], -torch.inf)
            hidden = hidden + scores.softmax(-1) @ values[block, slot]
        return self.embedding @ hidden[-1]


def answer_alone(prompt, num_output):
    """Tokens and logits, [num_output, vocabulary], of an answer from the model and nothing else."""
    tokens = list(prompt)
    logits = []
    table = list(range(len(prompt) + num_output))
    model = TinyModel(len(table), block_tokens=1)
    for start in (0, *range(len(prompt), len(prompt) + num_output - 1)):
        logits.append(model.forward(tokens, start, table))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)
