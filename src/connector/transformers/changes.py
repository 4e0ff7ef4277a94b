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
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SAMPLE = 16  # values of each tensor, evenly spaced
ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of a layer of PEFT's
Samples = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]


class Weights:
    """Weights of `model`, as they were at the last look. Calls `reset` when they have changed."""

    def __init__(self, model: PreTrainedModel, reset: Callable[[], object]) -> None:
        self._model, self._reset = model, reset
        self.look()

    def follow(self) -> None:
        """The weights may have changed since the last call."""
        places, samples, values = self._seen
        if _places(self._model)[0] == places and all(map(torch.equal, _values(samples), values)):
            return
        logger.warning("the model has other weights than at the last answer: nothing cached before is used")
        self._reset()
        self.look()  # not before: a reset that fails is tried again

    def look(self) -> None:
        """Note where all weights are, views of a sample of each, which are made once, and their values."""
        places, tensors = _places(self._model)
        samples: Samples = defaultdict(list)
        for tensor in tensors:
            if tensor.numel() and not tensor.is_meta:
                samples[tensor.device, tensor.dtype].append(_sample(tensor))
        self._seen = places, samples, _values(samples)


@torch.inference_mode()
def _values(samples: Samples) -> list[torch.Tensor]:
    """As bytes: a NaN is equal to itself there."""
    return [torch.cat(each).view(torch.uint8) for each in samples.values()]


def _places(model: torch.nn.Module) -> tuple[list[object], list[torch.Tensor]]:
    """Where each parameter and each buffer of a checkpoint is and how often it was written, with the mode and adapters;
    and these tensors. `modules()` makes a name for each module, which takes longer than all else.
    """
    found, kept, known = [model], list[torch.Tensor | None](), list[object]([model.training])
    for module in found:
        fields = vars(module)
        if fields["_modules"]:
            found += [each for each in fields["_modules"].values() if each is not None]
        if fields["_parameters"]:
            kept += fields["_parameters"].values()
        if fields["_buffers"]:
            passing = fields["_non_persistent_buffers_set"]
            kept += [buffer for name, buffer in fields["_buffers"].items() if name not in passing]
        if not fields.keys().isdisjoint(ADAPTERS):
            known += adapters_of(module)
    tensors = plain(each for each in kept if each is not None)
    known += [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]
    return known, tensors


def plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """These tensors, and of quantized or distributed ones those that they are made of."""
    found = list[torch.Tensor]()
    for each in tensors:
        if type(each) is torch.nn.Parameter or not is_traceable_wrapper_subclass(each):
            found.append(each)
        else:
            found += plain(getattr(each, name) for name in each.__tensor_flatten__()[0])
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Values at equal distances in memory, whatever the tensor's strides."""
    span = tensor.numel()
    if not tensor.is_contiguous():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (min(SAMPLE, span),), (max(1, span // SAMPLE),))


def adapters_of(module: torch.nn.Module) -> list[str]:
    """Adapters that a layer of PEFT's computes with."""
    fields = vars(module)
    return [repr(fields[name]) for name in ADAPTERS if name in fields]
