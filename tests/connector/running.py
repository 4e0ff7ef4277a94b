"""Prompts, and how far logits are apart. Models are in host memory, unless COPIER_DEVICE names another device."""

import os

import torch

BLOCK = 16
DEVICE = torch.device(os.environ.get("COPIER_DEVICE", "cpu"))


def error(logits, reference):
    """How far apart they are, in deviations of the reference."""
    return float((logits - reference).abs().max() / reference.std())


def apart(ours, wanted):
    """How far the logits of two answers are apart, at most, and whether their tokens are equal."""
    off = max(error(*both) for both in zip(ours.logits, wanted.logits, strict=True))
    return off, bool(torch.equal(ours.sequences, wanted.sequences))


def prompt(seed, length=208):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def document(seed, length):
    return prompt(seed, length).tolist()


def last_boundary(length, block_tokens=BLOCK):
    return (length - 1) // block_tokens * block_tokens
