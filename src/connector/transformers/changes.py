"""Whether a model computes with other weights than it did: KV of before is then of no use, and no call reports it.

    counted writes       an optimizer's step, `load_state_dict`, `parameter.mul_`      torch counts them for each tensor
    uncounted writes     `parameter.data.copy_`, an adapter merged by `.data += ...`   a sample of the values differs
    other tensors        `model.to`, a parameter put in place, modules added           other addresses, other counts
    adapters             added, chosen, switched off, weighted                         the fields of PEFT's layers
    mode                 `model.train()`, with dropout                                 its flag

A look costs some microseconds for each parameter. Buffers that no checkpoint has are left out: models write to some of
them while they compute. A write to less than the sample of a tensor, behind torch's back, is not seen.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SAMPLE = 16  # values of each tensor, evenly spaced
ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of a layer of PEFT's


class Weights:
    """Weights of `model`, as they were at the last look. Calls `reset` when they have changed."""

    def __init__(self, model: PreTrainedModel, reset: Callable[[], object]) -> None:
        self._model = model
        self._reset = reset
        self._seen = self._look()

    def follow(self) -> None:
        """The weights may have changed since the last call."""
        seen = self._look()
        if seen != self._seen:
            logger.warning("the model has other weights than at the last answer: nothing cached before is used")
            self._reset()
        self._seen = seen  # not before: a reset that fails is tried again

    @torch.inference_mode()
    def _look(self) -> Hashable:
        known: list[Hashable] = [self._model.training]  # dropout
        samples: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for module in self._model.modules():
            known += adapters_of(module)
            for tensor in _tensors(module):
                known.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version))
                if tensor.numel() and not tensor.is_meta:
                    samples[tensor.device, tensor.dtype].append(_sample(tensor))
        values = (torch.cat(each).view(torch.uint8).cpu().numpy().tobytes() for each in samples.values())
        return tuple(known), tuple(values)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module itself, and the buffers that a checkpoint has."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield from _plain(parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield from _plain(buffer)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or those that a quantized or distributed one is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Values at equal distances in memory, whatever the tensor's strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((min(SAMPLE, span),), (max(1, span // SAMPLE),))


def adapters_of(module: torch.nn.Module) -> list[Hashable]:
    """Adapters that a layer of PEFT's computes with."""
    return [repr(vars(module)[name]) for name in ADAPTERS if name in vars(module)]
