"""Near which processors a device is, where the system says."""

from pathlib import Path

PCI = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")


def processors_near(pci_address: str) -> set[int]:
    """The processors of the device's NUMA node; none where nobody knows."""
    node = PCI / pci_address / "numa_node"
    if not node.exists() or int(node.read_text()) < 0:
        return set()
    processors = NODES / f"node{int(node.read_text())}" / "cpulist"
    return set(_numbers(processors.read_text())) if processors.exists() else set()


def _numbers(text: str) -> list[int]:
    """
    >>> _numbers("0-2,8")
    [0, 1, 2, 8]
    """
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1) if first else ()
    return numbers
