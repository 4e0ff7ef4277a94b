"""CUDA's driver, libcuda."""

import ctypes
from functools import partial

from cpu_prefix_cache.memory.driver import NOT_SUPPORTED, DriverError, check
from cpu_prefix_cache.memory.scope import Scope
from cpu_prefix_cache.messages.errors import ConfigurationError

STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to the copy
BATCH_SINCE = 12080  # the version of CUDA whose cuMemcpyBatchAsync is called here; newer drivers keep it


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCH = ctypes.PYFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)
_check = partial(check, "CUDA")


# Arguments of every batch: the attributes hold from copy 0 on, and the number of a failed copy is not read.
_IN_ORDER, _ZERO, _FAILED = _Attributes(source_order=STREAM_ORDER), _SIZE(0), _SIZE(0)


class CudaDriver:
    """libcuda, loaded as `library`, whose calls release Python's lock, and as `quick`, whose calls keep it."""

    name = "CUDA"

    def __init__(self, library: ctypes.CDLL, quick: ctypes.PyDLL) -> None:
        self._library = library
        self._quick = quick
        self._batch = _batch_entry(library)
        self._contexts: dict[int, int] = {}

    @property
    def has_batches(self) -> bool:
        """Drivers have them from CUDA 12.8 on."""
        return self._batch is not None

    def register(self, address: int, num_bytes: int) -> None:
        """Kernel launches wait meanwhile: 0.6 to 1.2 ms for 16 MiB (one H200)."""
        _check("pin host memory", self._library.cuMemHostRegister_v2(_POINTER(address), _SIZE(num_bytes), 0))

    def unregister(self, address: int) -> None:
        _check("unpin host memory", self._library.cuMemHostUnregister(_POINTER(address)))

    def copy(self, destination: int, source: int, num_bytes: int, stream: int, pinned: bool = False) -> None:
        addresses = ctypes.c_uint64(destination), ctypes.c_uint64(source)
        library = self._quick if pinned else self._library
        _check("copy", library.cuMemcpyAsync(*addresses, _SIZE(num_bytes), _POINTER(stream)))

    def copy_batch(
        self, destinations: int, sources: int, sizes: int, count: int, stream: int, order: int = STREAM_ORDER
    ) -> None:
        if self._batch is None:
            raise DriverError("copy in batches (it needs CUDA 12.8)", NOT_SUPPORTED, self.name)
        attributes = _IN_ORDER if order == STREAM_ORDER else _Attributes(source_order=order)
        same = ctypes.addressof(attributes), ctypes.addressof(_ZERO), 1, ctypes.addressof(_FAILED)
        _check("copy a batch", self._batch(destinations, sources, sizes, count, *same, stream))

    def wait(self, stream: int, event: int) -> None:
        _check("wait for an event", self._quick.cuStreamWaitEvent(_POINTER(stream), _POINTER(event), 0))

    def working_in(self, device: int | None) -> Scope:
        if device is None:
            return Scope(self._exchange)
        return Scope(self._exchange, partial(self._enter, self._primary_context(device)), self._leave)

    def _exchange(self, mode: ctypes.c_int) -> None:
        _check("change a capture mode", self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def _enter(self, context: int) -> None:
        _check("enter a context", self._quick.cuCtxPushCurrent_v2(_POINTER(context)))

    def _leave(self) -> None:
        _check("leave a context", self._quick.cuCtxPopCurrent_v2(ctypes.byref(_POINTER())))

    def _primary_context(self, device: int) -> int:
        """Torch's context of a device. Retained once, and kept."""
        if device not in self._contexts:
            context = _POINTER()
            _check("give a context", self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    def pci_address(self, device: int) -> str:
        text = ctypes.create_string_buffer(32)
        _check("tell a PCI address", self._library.cuDeviceGetPCIBusId(text, 32, device))
        return text.value.decode().lower()


def _batch_entry(library: ctypes.CDLL) -> "ctypes._FuncPointer | None":
    try:
        find = library.cuGetProcAddress_v2
    except AttributeError:  # a driver of CUDA 11
        return None
    entry, status = ctypes.c_void_p(), ctypes.c_int()
    code = find(b"cuMemcpyBatchAsync", ctypes.byref(entry), BATCH_SINCE, ctypes.c_uint64(0), ctypes.byref(status))
    return None if code or not entry.value else _BATCH(entry.value)


def cuda_driver() -> CudaDriver:
    """Raises ConfigurationError where there is no such driver."""
    try:
        return CudaDriver(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1"))
    except OSError as missing:
        raise ConfigurationError(
            f"this torch was built for CUDA, and NVIDIA's driver is not here ({missing}); install the driver, or keep "
            "the tensors on the CPU"
        ) from missing
