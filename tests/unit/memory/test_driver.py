"""CUDA's driver, with a library that keeps book: calls that are made once, and calls that give back on an error."""

from types import SimpleNamespace

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.memory import cuda
from cpu_prefix_cache.memory.cuda import CudaDriver, cuda_driver
from cpu_prefix_cache.memory.driver import DriverError


class Library:
    """Notes the calls; those in `refused` it refuses."""

    def __init__(self):
        self.asked, self.refused = [], set()

    def __getattr__(self, name):
        if name == "cuGetProcAddress_v2":
            raise AttributeError(name)

        def call(*arguments):
            self.asked.append(name)
            return 1 if name in self.refused else 0

        return call


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def driver(library):
    return CudaDriver(library, library)


RETAIN = "cuDevicePrimaryCtxRetain"
PUSH = "cuCtxPushCurrent_v2"
MODE = "cuThreadExchangeStreamCaptureMode"
POP = "cuCtxPopCurrent_v2"


def test_a_context_is_retained_once(driver, library):
    for device in (0, 0, 1):
        driver.working_in(device)
    assert library.asked == [RETAIN] * 2


def test_without_a_device_the_capture_mode_alone_is_another(driver, library):
    with driver.working_in(None):
        assert library.asked == [MODE]
    assert library.asked == [MODE, MODE]


def test_a_context_is_left_when_it_cannot_be_worked_in(driver, library):
    library.refused.add(MODE)
    with pytest.raises(DriverError, match="capture mode"), driver.working_in(7):
        raise AssertionError("it was entered")
    assert library.asked == [RETAIN, PUSH, MODE, POP]


def test_the_context_is_popped_when_the_capture_mode_cannot_be_set_back(driver, library):
    with pytest.raises(DriverError, match="capture mode"), driver.working_in(7):
        library.refused.add(MODE)
    assert library.asked == [RETAIN, PUSH, MODE, MODE, POP]


def test_a_missing_driver_is_refused_in_a_sentence(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda, "ctypes", SimpleNamespace(CDLL=missing, PyDLL=missing))
    with pytest.raises(ConfigurationError, match=r"NVIDIA's driver is not here .*libcuda.*; install the driver"):
        cuda_driver()
