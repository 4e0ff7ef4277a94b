"""Prompts, and how far logits are apart."""

import torch

BLOCK = 16


def error(logits, reference):
    """How far apart they are, in deviations of the reference."""
    return float((logits - reference).abs().max() / reference.std())


def prompt(seed, length=208):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def document(seed, length):
    return prompt(seed, length).tolist()


def last_boundary(length, block_tokens=BLOCK):
    return (length - 1) // block_tokens * block_tokens
