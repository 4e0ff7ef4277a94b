"""Codecs: the forms in which a group's bytes are kept on the host.

    none        as on the device
    exponent    of bf16, with 4 bits for the exponent: 49 bytes for 64, all bits equal (copier/coded_form.py)

A coded form has a fixed size. Bytes that do not *fit* it are not kept; their store is reported so.
"""

from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Codec:
    """`raw` bytes are kept in `kept`. Every part of a block has whole units of `unit` bytes, of torch's `dtype`."""

    name: str
    raw: int = 1
    kept: int = 1
    unit: int = 1
    dtype: str | None = None  # None: any
    spelled: str | None = None  # in a namespace; with a version, because files outlive programs

    def kept_bytes(self, num_bytes: int) -> int:
        """The bytes on the host of so many on the device. Raises ConfigurationError unless these are whole units.

        >>> EXPONENT.kept_bytes(16384), NONE.kept_bytes(7)
        (12544, 7)
        """
        if num_bytes % self.unit:
            raise ConfigurationError(
                f'codec "{self.name}" takes whole units of {self.unit} bytes, got {num_bytes}; '
                f'take blocks of more tokens, or codec="{RAW}"'
            )
        return num_bytes // self.raw * self.kept

    def check(self, name: str, content: str, num_bytes: int) -> None:
        """Raise ConfigurationError unless it takes a part of this name, with blocks of `num_bytes` bytes, whose
        `content` is a type and a shape, such as bfloat16[16, 8, 128].
        """
        if self.dtype is not None and content.partition("[")[0] != self.dtype:
            raise ConfigurationError(
                f'codec "{self.name}" is for {self.dtype}, and the {name} is {content}; take codec="{RAW}"'
            )
        self.kept_bytes(num_bytes)


RAW = "none"
NONE = Codec(RAW)
EXPONENT = Codec("exponent", raw=64, kept=49, unit=1024, dtype="bfloat16", spelled="exponent 1")
CODECS = {codec.name: codec for codec in (NONE, EXPONENT)}


def codec_of(name: str) -> Codec:
    """The codec of this name. Raises ConfigurationError for another."""
    if name not in CODECS:
        raise ConfigurationError(f"codec must be one of {', '.join(CODECS)}; got {name!r}")
    return CODECS[name]
