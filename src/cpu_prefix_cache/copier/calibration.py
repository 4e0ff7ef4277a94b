"""What was measured of a machine's copies, once: what `choose_copier` goes by, and `cpu-prefix-cache bench` writes.

A calibration belongs to a device and to the versions it was measured with; for any other there is SHIPPED, from the
machine named in it. It is kept as a small file of JSON under the user's cache directory.
"""

import json
import logging
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

VERSION = 1  # of the file


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates are in GB/s (1e9 bytes), of one large copy and of staged copies of 16 KiB fragments.

    Blocks of `direct_bytes` or more in every part cross directly as fast as through the staging ring, at no more cost
    to the host.
    """

    device: str  # its name
    versions: str
    link_store: float
    link_load: float
    staged_store: float
    staged_load: float
    direct_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.device} ({self.versions}): link {self.link_store:.1f}/{self.link_load:.1f} GB/s store/load, "
            f"staged {self.staged_store:.1f}/{self.staged_load:.1f}, direct from {self.direct_bytes // 1024} KiB"
        )


# benchmarks/copies.py on one H200; see docs/copy_paths.md for the table.
SHIPPED = Calibration(
    device="NVIDIA H200",
    versions="torch 2.11.0+cu130, CUDA 13.0",
    link_store=55.2,
    link_load=55.4,
    staged_store=54.3,
    staged_load=54.8,
    direct_bytes=1024 * 1024,
)


def versions() -> str:
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}"


def save(calibration: Calibration, folder: Path | None = None) -> Path:
    """Where it was written. Raises OSError when it cannot be."""
    path = _path(calibration.device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"version": VERSION, **asdict(calibration)}, indent=2) + "\n")
    return new.replace(path)


def calibration_for(device: torch.device, folder: Path | None = None) -> tuple[Calibration, str]:
    """The calibration to go by, and in a clause for the log where it is from."""
    if device.type != "cuda":
        return SHIPPED, "shipped"
    name = torch.cuda.get_device_name(device)
    path: Path | str = "the user's cache directory"
    try:
        path = _path(name, folder)
        found = _read(path)
    except FileNotFoundError:
        return SHIPPED, "shipped; `cpu-prefix-cache bench` measures this machine"
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        logger.warning("%s holds no calibration (%r); `cpu-prefix-cache bench` writes one", path, error)
        return SHIPPED, "shipped"
    if (found.device, found.versions) != (name, versions()):
        return SHIPPED, f"shipped: {path} is of {found.device} with {found.versions}"
    return found, f"from {path}"


def _read(path: Path) -> Calibration:
    """Raises ValueError, KeyError, TypeError or RecursionError for a file that is no calibration of this version."""
    stored = json.loads(path.read_text())
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    kinds = {field.name: type(getattr(SHIPPED, field.name)) for field in fields(Calibration)}
    return Calibration(**{name: _of_kind(stored[name], kind) for name, kind in kinds.items()})


def _of_kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (isinstance(value, float | int) and not 0 < value < 1 << 60):
        raise TypeError(f"{value!r} is no {kind.__name__} that can be")
    return value


def _path(device: str, folder: Path | None) -> Path:
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpu-prefix-cache"
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return folder / f"copies-{name}.json"
