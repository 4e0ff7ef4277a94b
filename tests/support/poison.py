"""Blocks that are handed out lose what they held, once copies of it can have begun."""

import torch


def poison(manager, handing_out, host, kv, value=torch.nan):
    """Before compute, overwrite what was handed out by this method and no load fills, in `kv` [2, layers, blocks, ...].
    With NaN, to read a block before it is written shows in every logit.
    """
    take = getattr(manager, handing_out)
    begin_step = host.begin_step
    given = set()

    def noting(*arguments):
        taken = take(*arguments)
        given.update(taken if isinstance(taken, list) else [taken])
        return taken

    def poisoning():
        begin_step()
        kv[:, :, list(given - host.cache.filling().keys())] = value
        given.clear()

    setattr(manager, handing_out, noting)
    host.begin_step = poisoning
