"""AMD's driver, with a library that a C compiler builds from HIP's documented prototypes and that notes its arguments.

No AMD device is needed. It shows that every argument arrives whole and in its place, that codes become errors, that
quick calls keep Python's lock and others release it, and that torch's own copy of the library is taken. It does not
show that the real library does what it documents.
"""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.memory import hip
from cpu_prefix_cache.memory.driver import DriverError, accelerator_driver
from cpu_prefix_cache.memory.hip import HipDriver
from cpu_prefix_cache.memory.scope import RELAXED

COMPILER = shutil.which(os.environ.get("CC", "cc"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here to build the library with")

PROTOTYPES = {
    "hipHostRegister": "hipError_t hipHostRegister(void* hostPtr, size_t sizeBytes, unsigned int flags)",
    "hipHostUnregister": "hipError_t hipHostUnregister(void* hostPtr)",
    "hipMemcpyAsync": "hipError_t hipMemcpyAsync(void* dst, const void* src, size_t sizeBytes, hipMemcpyKind kind, "
    "hipStream_t stream)",
    "hipStreamWaitEvent": "hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned int flags)",
    "hipGetDevice": "hipError_t hipGetDevice(int* deviceId)",
    "hipSetDevice": "hipError_t hipSetDevice(int deviceId)",
    "hipThreadExchangeStreamCaptureMode": "hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode)",
    "hipDeviceGetPCIBusId": "hipError_t hipDeviceGetPCIBusId(char* pciBusId, int len, int device)",
}
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef enum { hipSuccess = 0 } hipError_t;
typedef enum { hipMemcpyHostToHost, hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice,
               hipMemcpyDefault } hipMemcpyKind;
typedef enum { hipStreamCaptureModeGlobal, hipStreamCaptureModeThreadLocal, hipStreamCaptureModeRelaxed }
    hipStreamCaptureMode;
typedef struct ihipStream_t* hipStream_t;
typedef struct ihipEvent_t* hipEvent_t;

static char notes[1 << 14], refused[64];
static int code, current = 0;
static hipStreamCaptureMode capture = hipStreamCaptureModeGlobal;

const char* stub_notes(void) { return notes; }
void stub_refuse(const char* name, int with) { strcpy(refused, name); code = with; }
void stub_reset(void) { notes[0] = refused[0] = 0; current = 0; capture = hipStreamCaptureModeGlobal; }
int stub_device(void) { return current; }
int stub_capture(void) { return capture; }

static hipError_t note(const char* name, int count, const uint64_t* values) {
    int (*holds_lock)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    char* end = notes + strlen(notes);
    end += sprintf(end, "%s %s", name, holds_lock && holds_lock() ? "locked" : "free");
    for (int at = 0; at < count; at++) end += sprintf(end, " %llx", (unsigned long long)values[at]);
    sprintf(end, "\\n");
    return strcmp(name, refused) ? hipSuccess : (hipError_t)code;
}
#define NOTE(...) note(__func__, sizeof((uint64_t[]){__VA_ARGS__}) / 8, (uint64_t[]){__VA_ARGS__})
#define AS(value) (uint64_t)(value)

@hipHostRegister@ { return NOTE(AS(hostPtr), AS(sizeBytes), AS(flags)); }
@hipHostUnregister@ { return NOTE(AS(hostPtr)); }
@hipMemcpyAsync@ { return NOTE(AS(dst), AS(src), AS(sizeBytes), AS(kind), AS(stream)); }
@hipStreamWaitEvent@ { return NOTE(AS(stream), AS(event), AS(flags)); }
@hipGetDevice@ { *deviceId = current; return note(__func__, 0, NULL); }
@hipSetDevice@ {
    hipError_t error = NOTE(AS(deviceId));
    if (!error) current = deviceId;
    return error;
}
@hipThreadExchangeStreamCaptureMode@ {
    hipStreamCaptureMode before = capture;
    hipError_t error = NOTE(AS(*mode));
    if (error) return error;
    capture = *mode;
    *mode = before;
    return hipSuccess;
}
@hipDeviceGetPCIBusId@ {
    if (len > 12) strcpy(pciBusId, "0000:C3:00.0");
    return NOTE(AS(len), AS(device));
}
"""
# All 64 bits are in use, and those of no argument are those of another.
HOST = 0xFEDCBA9876543210
DEVICE = 0xA1B2C3D4E5F60718
STREAM = 0x8F7E6D5C4B3A2918
SIZE = 0x9182736455463728
EVENT = 0xB3A4958677685950


def built(path, changed=("", "")):
    """The library at `path`, with one text in its prototypes changed."""
    source = SOURCE
    for name, prototype in PROTOTYPES.items():
        source = source.replace(f"@{name}@", prototype.replace(*changed))
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", path, f"-Wl,-soname,{path.name}", "-ldl"]
    subprocess.run(command, input=source, text=True, check=True)
    return path


class Stub:
    """The library at a path and a driver on it."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.stub_notes.restype = ctypes.c_char_p
        self.driver = HipDriver(self.library, ctypes.PyDLL(str(path)))

    def notes(self):
        """Each call: its name, whether it held Python's lock, and its arguments."""
        lines = [line.split() for line in self.library.stub_notes().decode().splitlines()]
        return [(name, lock == "locked", *(int(value, 16) for value in values)) for name, lock, *values in lines]

    def refuse(self, name, code=1):
        self.library.stub_refuse(name.encode(), code)

    def state(self):
        """The device and the capture mode that calls are made with."""
        return self.library.stub_device(), self.library.stub_capture()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hip")


@pytest.fixture(scope="module")
def stub_as_documented(folder):
    return Stub(built(folder / "documented.so"))


@pytest.fixture
def stub(stub_as_documented):
    stub_as_documented.library.stub_reset()
    return stub_as_documented


def work(driver):
    with driver.working_in(3):
        pass


EXCHANGE = "hipThreadExchangeStreamCaptureMode"
GET = "hipGetDevice"
SET = "hipSetDevice"
# a method of the driver, and the calls that it makes: whether they keep the lock, and with which arguments
ASKED = {
    "register": (lambda driver: driver.register(HOST, SIZE), [("hipHostRegister", False, HOST, SIZE, 0)]),
    "unregister": (lambda driver: driver.unregister(HOST), [("hipHostUnregister", False, HOST)]),
    "copy": (
        lambda driver: driver.copy(DEVICE, HOST, SIZE, STREAM),
        [("hipMemcpyAsync", False, DEVICE, HOST, SIZE, 4, STREAM)],
    ),
    "copy what is pinned": (
        lambda driver: driver.copy(HOST, DEVICE, SIZE, STREAM, pinned=True),
        [("hipMemcpyAsync", True, HOST, DEVICE, SIZE, 4, STREAM)],
    ),
    "wait": (lambda driver: driver.wait(STREAM, EVENT), [("hipStreamWaitEvent", True, STREAM, EVENT, 0)]),
    "work": (work, [(GET, True), (SET, True, 3), (EXCHANGE, True, RELAXED), (EXCHANGE, True, 0), (SET, True, 0)]),
    "tell an address": (lambda driver: driver.pci_address(5), [("hipDeviceGetPCIBusId", False, 32, 5)]),
}


def made(stub, asked):
    ask, wanted = ASKED[asked]
    ask(stub.driver)
    return stub.notes(), wanted


@needs_compiler
@pytest.mark.parametrize("asked", ASKED)
def test_every_argument_arrives_whole_and_in_its_place_and_quick_calls_alone_keep_the_lock(stub, asked):
    calls, wanted = made(stub, asked)
    assert calls == wanted


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ("register", ("void* hostPtr, size_t sizeBytes", "size_t sizeBytes, void* hostPtr")),
        ("register", ("void* hostPtr, size_t", "void* hostPtr, unsigned int")),
        ("unregister", ("void* hostPtr", "int hostPtr")),
        ("copy", ("void* dst, const void* src", "const void* src, void* dst")),
        ("copy", ("size_t sizeBytes, hipMemcpyKind", "unsigned int sizeBytes, hipMemcpyKind")),
        ("copy what is pinned", ("hipMemcpyKind kind, hipStream_t stream", "hipStream_t stream, hipMemcpyKind kind")),
        ("tell an address", ("int len, int device", "int device, int len")),
    ],
)
def test_a_library_with_two_arguments_swapped_or_one_too_narrow_is_noticed(tmp_path, asked, changed):
    """The control of the test above."""
    calls, wanted = made(Stub(built(tmp_path / "changed.so", changed)), asked)
    assert calls != wanted


@needs_compiler
@pytest.mark.parametrize("asked", ASKED)
def test_a_code_of_any_call_becomes_an_error(stub, asked):
    ask, wanted = ASKED[asked]
    for name in {call[0] for call in wanted}:
        stub.refuse(name, 719)
        with pytest.raises(DriverError, match=r"^HIP would not .*: error 719$") as error:
            ask(stub.driver)
        assert error.value.code == 719


@needs_compiler
def test_a_pci_address_is_written_as_the_system_writes_it(stub):
    assert stub.driver.pci_address(0) == "0000:c3:00.0"


@needs_compiler
def test_there_are_no_batches(stub):
    assert not stub.driver.has_batches
    with pytest.raises(DriverError, match="HIP would not copy in batches"):
        stub.driver.copy_batch(HOST, DEVICE, SIZE, 1, STREAM)
    assert not stub.notes()


@needs_compiler
def test_scopes_nest_and_each_gives_back_what_it_found(stub):
    with stub.driver.working_in(3):
        assert stub.state() == (3, RELAXED)
        with stub.driver.working_in(1):
            assert stub.state() == (1, RELAXED)
        with stub.driver.working_in(None):
            assert stub.state() == (3, RELAXED)
        assert stub.state() == (3, RELAXED)
    assert stub.state() == (0, 0)


@needs_compiler
def test_without_a_device_the_capture_mode_alone_is_another(stub):
    with stub.driver.working_in(None):
        assert stub.state() == (0, RELAXED)
    assert {name for name, *_ in stub.notes()} == {EXCHANGE}


@needs_compiler
def test_a_device_is_left_when_the_capture_mode_cannot_be_changed(stub):
    stub.refuse(EXCHANGE)
    with pytest.raises(DriverError, match="capture mode"), stub.driver.working_in(3):
        raise AssertionError("it was entered")
    assert stub.state() == (0, 0)


@needs_compiler
def test_the_device_is_restored_when_the_capture_mode_cannot_be(stub):
    with pytest.raises(DriverError, match="capture mode"), stub.driver.working_in(3):
        stub.refuse(EXCHANGE)
    assert stub.state() == (0, RELAXED)


FINDS = """
import ctypes, sys
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(version=SimpleNamespace(hip="7.0", cuda=None))  # as much as is asked of it
from cpu_prefix_cache.memory.driver import accelerator_driver
loaded = ctypes.CDLL(sys.argv[1])
accelerator_driver().unregister(1)
loaded.stub_notes.restype = ctypes.c_char_p
print(accelerator_driver().name, loaded.stub_notes() != b"")
"""


@needs_compiler
@pytest.mark.parametrize(("name", "is_taken"), [(hip.LIBRARIES[-1], True), ("libother.so", False)])
def test_torchs_own_copy_of_the_library_is_taken_before_those_that_the_system_finds(tmp_path, name, is_taken):
    """Streams of one copy mean nothing to another: a ROCm wheel of torch has its own, and the system may have one. The
    control is a library that is loaded and is not HIP's."""
    torchs, systems = tmp_path / "torch", tmp_path / "system"
    torchs.mkdir()
    systems.mkdir()
    for other in hip.LIBRARIES:
        built(systems / other)
    command = [sys.executable, "-c", FINDS, str(built(torchs / name))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(systems)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["HIP", str(is_taken)]


@pytest.fixture
def built_for(monkeypatch):
    """Sets the vendor that torch was built for."""

    def say(hip=None, cuda=None):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        accelerator_driver.cache_clear()

    yield say
    accelerator_driver.cache_clear()


def test_a_missing_library_of_rocm_is_refused_in_a_sentence(built_for, monkeypatch):
    monkeypatch.setattr(hip, "LIBRARIES", ("libamdhip64.so.none",))
    built_for(hip="7.0")
    with pytest.raises(ConfigurationError, match=r"was built for ROCm.*libamdhip64\.so\.none.*install ROCm's HIP"):
        accelerator_driver()
