"""AMD's driver, libamdhip64, which torch has loaded already where it was built for ROCm."""

import ctypes
import os
from functools import partial

from cpu_prefix_cache.memory.driver import NOT_SUPPORTED, DriverError, check
from cpu_prefix_cache.memory.scope import Scope
from cpu_prefix_cache.messages.errors import ConfigurationError

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
DEFAULT = 4  # hipMemcpyDefault: which side is the device's follows from the addresses
PCI_ADDRESS_BYTES = 32

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_PROTOTYPES = {
    "hipHostRegister": (_POINTER, _SIZE, ctypes.c_uint),
    "hipHostUnregister": (_POINTER,),
    "hipMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "hipStreamWaitEvent": (_POINTER, _POINTER, ctypes.c_uint),
    "hipGetDevice": (ctypes.POINTER(_INT),),
    "hipSetDevice": (_INT,),
    "hipThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
    "hipDeviceGetPCIBusId": (ctypes.c_char_p, _INT, _INT),
}
_check = partial(check, "HIP")


class HipDriver:
    """libamdhip64, loaded as `library`, whose calls release Python's lock, and as `quick`, whose calls keep it."""

    name = "HIP"
    has_batches = False  # hipMemcpyBatchAsync before ROCm 7.14 refuses its attributes or is a loop (users' reports)

    def __init__(self, library: ctypes.CDLL, quick: ctypes.PyDLL) -> None:
        for each in (library, quick):
            for name, arguments in _PROTOTYPES.items():
                getattr(each, name).argtypes = arguments
        self._library, self._quick = library, quick

    def register(self, address: int, num_bytes: int) -> None:
        _check("pin host memory", self._library.hipHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> None:
        _check("unpin host memory", self._library.hipHostUnregister(address))

    def copy(self, destination: int, source: int, num_bytes: int, stream: int, pinned: bool = False) -> None:
        library = self._quick if pinned else self._library
        _check("copy", library.hipMemcpyAsync(destination, source, num_bytes, DEFAULT, stream))

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        raise DriverError("copy in batches (`copy` is as fast there)", NOT_SUPPORTED, self.name)

    def wait(self, stream: int, event: int) -> None:
        _check("wait for an event", self._quick.hipStreamWaitEvent(stream, event, 0))

    def working_in(self, device: int | None) -> Scope:
        if device is None:
            return Scope(self._exchange)
        before = _INT()
        return Scope(self._exchange, partial(self._enter, device, before), partial(self._set_device, before))

    def _exchange(self, mode: ctypes.c_int) -> None:
        _check("change a capture mode", self._quick.hipThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def _enter(self, device: int, before: ctypes.c_int) -> None:
        _check("tell the device of a thread", self._quick.hipGetDevice(ctypes.byref(before)))
        self._set_device(device)

    def _set_device(self, device: int | ctypes.c_int) -> None:
        _check("change the device of a thread", self._quick.hipSetDevice(device))

    def pci_address(self, device: int) -> str:
        text = ctypes.create_string_buffer(PCI_ADDRESS_BYTES)
        _check("tell a PCI address", self._library.hipDeviceGetPCIBusId(text, PCI_ADDRESS_BYTES, device))
        return text.value.decode().lower()


def hip_driver() -> HipDriver:
    """Torch's own copy of the library before any other, because streams of one copy mean nothing to another. Raises
    ConfigurationError where there is none."""
    missing: OSError | None = None
    for mode in (os.RTLD_NOLOAD, ctypes.DEFAULT_MODE):
        for name in LIBRARIES:
            try:
                return HipDriver(ctypes.CDLL(name, mode), ctypes.PyDLL(name, mode))
            except OSError as error:
                missing = error
    raise ConfigurationError(
        f"this torch was built for ROCm, and AMD's driver is not here ({missing}); install ROCm's HIP runtime, or keep "
        "the tensors on the CPU"
    ) from missing
