"""Modules of SGLang that these tests put an empty one in place of, each with the reason.

None of them is a kernel: on a CPU, SGLang's pools, allocators, tree, linker wrapper and scheduling run as they are, and
the tree is the one in Rust.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NEEDS_TORCHVISION = "prepares images with torchvision, whose wheel on PyPI is for torch with CUDA"
STUBBED = {
    "sglang.srt.multimodal.internvl_utils": NEEDS_TORCHVISION,
    "sglang.srt.configs.deepseek_ocr": NEEDS_TORCHVISION,
}


class Absent(type):
    """A name of a stubbed module: may be imported, inherited from and read from, but not called."""

    def __getattr__(cls, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{cls.__name__} is stubbed in these tests")


class Stub(ModuleType):
    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}", (), {})


class Stubs(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in STUBBED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module is there, and empty."""


def install() -> None:
    sys.meta_path.insert(0, Stubs())
