"""The few calls of the CUDA driver that torch does not bind, through ctypes.

Calls of microseconds keep Python's lock: a thread that releases it beside a busy engine has it back after milliseconds
(`sys.getswitchinterval`), and a slice of a copy makes a dozen calls. Calls that may take long, to pin memory or to copy
what is not pinned, release it.
"""

import ctypes
from functools import cache

from cpu_prefix_cache.messages.errors import ConfigurationError

STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to the copy
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
BATCH_SINCE = 12080  # the version of CUDA whose cuMemcpyBatchAsync is called here; newer drivers keep it


class DriverError(RuntimeError):
    """CUDA refused a call, for the reason that `code` is CUDA's number of."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"CUDA would not {call}: error {code}")
        self.code = code


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


# Arguments of every batch: the attributes hold from copy 0 on, and the number of a failed copy is not read.
_IN_ORDER, _ZERO, _FAILED = _Attributes(source_order=STREAM_ORDER), _SIZE(0), _SIZE(0)


class Driver:
    """libcuda, loaded as `library`, whose calls release Python's lock, and as `quick`, whose calls keep it. A thread
    that calls it must be `working_in` a device. Every call raises DriverError when CUDA refuses it."""

    def __init__(self, library: ctypes.CDLL, quick: ctypes.PyDLL) -> None:
        self._library = library
        self._quick = quick
        self._batch = _batch_entry(library)
        self._contexts: dict[int, int] = {}

    @property
    def has_batches(self) -> bool:
        """Whether `copy_batch` is there: drivers have it from CUDA 12.8 on."""
        return self._batch is not None

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory. Kernel launches wait meanwhile: 0.6 to 1.2 ms for 16 MiB (one H200)."""
        _check("pin host memory", self._library.cuMemHostRegister_v2(_POINTER(address), _SIZE(num_bytes), 0))

    def unregister(self, address: int) -> None:
        _check("unpin host memory", self._library.cuMemHostUnregister(_POINTER(address)))

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """Have `stream` copy between device and host memory. This may block if the memory is not pinned."""
        addresses = ctypes.c_uint64(destination), ctypes.c_uint64(source)
        _check("copy", self._library.cuMemcpyAsync(*addresses, _SIZE(num_bytes), _POINTER(stream)))

    def copy_batch(
        self, destinations: int, sources: int, sizes: int, count: int, stream: int, order: int = STREAM_ORDER
    ) -> None:
        """Have `stream` carry out `count` copies. The first three are addresses of arrays of int64."""
        if self._batch is None:
            raise DriverError("copy in batches (it needs CUDA 12.8)", 801)
        attributes = _IN_ORDER if order == STREAM_ORDER else _Attributes(source_order=order)
        same = ctypes.addressof(attributes), ctypes.addressof(_ZERO), 1, ctypes.addressof(_FAILED)
        _check("copy a batch", self._batch(destinations, sources, sizes, count, *same, stream))

    def working_in(self, device: int | None) -> "Working":
        """A context manager: this thread works in torch's context of a device; None: in the context that it is in.

        Its calls do not disturb CUDA graphs that other threads capture. Otherwise even to query an event would end
        every capture of the process.
        """
        return Working(self._quick, None if device is None else self._primary_context(device))

    def _primary_context(self, device: int) -> int:
        """Retained once, and kept."""
        if device not in self._contexts:
            context = _POINTER()
            _check("give a context", self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    def pci_address(self, device: int) -> str:
        """Such as "0000:1b:00.0"."""
        text = ctypes.create_string_buffer(32)
        _check("tell a PCI address", self._library.cuDeviceGetPCIBusId(text, 32, device))
        return text.value.decode().lower()


class Working:
    """See Driver.working_in. A class, because a generator takes three times as long."""

    __slots__ = ("_context", "_library", "_mode")

    def __init__(self, library: ctypes.PyDLL, context: int | None) -> None:
        self._library, self._context, self._mode = library, context, ctypes.c_int(RELAXED)

    def __enter__(self) -> None:
        if self._context is not None:
            _check("enter a context", self._library.cuCtxPushCurrent_v2(_POINTER(self._context)))
        try:
            self._exchange_capture_mode()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._exchange_capture_mode()
        finally:
            self._leave()

    def _exchange_capture_mode(self) -> None:
        """Set the thread's mode to `_mode`, and `_mode` to what it was."""
        _check("change a capture mode", self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode)))

    def _leave(self) -> None:
        if self._context is not None:
            _check("leave a context", self._library.cuCtxPopCurrent_v2(ctypes.byref(_POINTER())))


def _check(call: str, code: int) -> None:
    if code:
        raise DriverError(call, code)


def _batch_entry(library: ctypes.CDLL) -> "ctypes._FuncPointer | None":
    try:
        find = library.cuGetProcAddress_v2
    except AttributeError:  # a driver of CUDA 11
        return None
    entry, status = ctypes.c_void_p(), ctypes.c_int()
    code = find(b"cuMemcpyBatchAsync", ctypes.byref(entry), BATCH_SINCE, ctypes.c_uint64(0), ctypes.byref(status))
    return None if code or not entry.value else _BATCH(entry.value)


@cache
def cuda_driver() -> Driver:
    """Raises ConfigurationError where there is no such driver."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1"))
    except OSError as missing:
        raise ConfigurationError(
            f"tensors on a device that torch calls cuda are copied by NVIDIA's driver, which is not here ({missing}); "
            "AMD's is not supported yet"
        ) from missing
