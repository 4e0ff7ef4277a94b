"""Prompts, and how far logits are apart. Models are in host memory, unless COPIER_DEVICE names another device."""

import os

import torch

BLOCK = 16
DEVICE = torch.device(os.environ.get("COPIER_DEVICE", "cpu"))
# Hidden size of models. On a GPU, torch's attention fails with 32 ("misaligned address"): of DeepSeek-V3, whose heads
# have four values then, its kernel reads 16 bytes at once.
HIDDEN = 32 if DEVICE.type == "cpu" else 128


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
