"""SGLang is imported with the few stubs that it needs on a CPU, before any test imports it."""

from tests.sglang.stubs import install

install()
