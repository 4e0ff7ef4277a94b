"""The negative control of tests that compare outputs of a connector, which chooses its copier itself."""

from collections.abc import Callable
from dataclasses import replace

from cpu_prefix_cache.copying import ChosenCopier
from cpu_prefix_cache.testing import CorruptingCopier


def damaging(choose_copier: Callable[..., ChosenCopier], name: str) -> Callable[..., ChosenCopier]:
    """In place of `choose_copier`: one block of the group of that name is damaged by every load.

    It raises ValueError where no group has that name.
    """

    def choose_and_damage(shapes, tensors, *arguments, **options):
        choice = choose_copier(shapes, tensors, *arguments, **options)
        group = [piece.group.name for piece in shapes.pieces].index(name)
        return replace(choice, copier=CorruptingCopier(choice.copier, tensors, group, loads=None))

    return choose_and_damage
