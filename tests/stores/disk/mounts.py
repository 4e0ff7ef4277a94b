"""File systems of a test's own, which it breaks: ext4 in a file, on a loop device, and one in user space (faulty.c)."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from contextlib import contextmanager
from pathlib import Path

from tests.support.threads import wait_until

SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2  # FS_IOC_SHUTDOWN, and what makes it a disk that is gone
SECONDS = 30.0


def missing():
    """Which of these this machine does not have, and why."""
    found = {}
    if why := _no_ext4():
        found["ext4"] = f"ext4 on a loop device ({why})"
    if why := _no_fuse():
        found["fuse"] = f"a file system in user space ({why})"
    return found


class MountError(Exception):
    """A file system that seems to be there cannot be mounted. The message names it, and the reason."""


class Ext4:
    """At `path`. With errors=remount-ro, as installers of distributions set it."""

    def __init__(self, folder, mib=64):
        self.path, image = folder / "ext4", folder / "image"
        self.path.mkdir()
        with image.open("wb") as file:
            file.truncate(mib << 20)
        run("mkfs.ext4", "-q", image)
        mount = ["mount", "-o", "loop,errors=remount-ro", image, self.path]
        made = subprocess.run(mount, capture_output=True, text=True, timeout=SECONDS)
        if made.returncode:
            raise MountError(f"ext4 on a loop device ({made.stderr.strip().splitlines()[0]})")
        device = os.stat(self.path).st_dev
        self._settings = (
            Path("/sys/fs/ext4") / Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").readlink().name
        )

    @contextmanager
    def frozen(self):
        """As by a snapshot of a volume: reads go on, every write waits."""
        self._check_own()
        os.sync()  # each page of a mapped file goes to the file system again when it is written
        run("fsfreeze", "--freeze", self.path)
        try:
            yield
        finally:
            run("fsfreeze", "--unfreeze", self.path)

    def fail(self):
        """As after an error of its metadata: it is read-only from now on."""
        (self._settings / "trigger_fs_error").write_text("told by a test")
        wait_until(lambda: not self._takes_files())

    def shut_down(self):
        """As when the disk is gone: every call fails."""
        self._check_own()
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
        finally:
            os.close(folder)

    @contextmanager
    def full(self):
        """Others have filled it, to the last block."""
        (self._settings / "reserved_clusters").write_text("0")  # else small files still find room
        filler = self.path / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                for _ in range(5):  # what was reserved for blocks to come is free again once they are written
                    _fill(file)
                    os.fsync(file.fileno())
            yield
        finally:
            filler.unlink(missing_ok=True)

    def close(self):
        subprocess.run(["umount", "--lazy", self.path], check=True)

    def _takes_files(self):
        try:
            (self.path / "probe").touch()
        except OSError:
            return False
        return True

    def _check_own(self):
        """Never freeze or shut down what the machine runs on."""
        if os.stat(self.path).st_dev in (os.stat("/").st_dev, os.stat(self.path.parent).st_dev):
            raise RuntimeError(f"{self.path} is not a mount of its own")


class Faulty:
    """At `path`: shows `folder / "shown"`, by faulty.c."""

    def __init__(self, folder):
        self.path = folder / "faulty"
        self.control = folder / "control"
        shown = folder / "shown"
        for each in (self.path, self.control, shown):
            each.mkdir()
        program = _built(folder)
        self._process = subprocess.Popen([program, shown, self.control, "-f", self.path])
        wait_until(lambda: os.path.ismount(self.path) or self._process.poll() is not None)
        if self._process.returncode:
            raise MountError(f"a file system in user space (mounting it ended with {self._process.returncode})")

    @contextmanager
    def told(self, fault):
        """hang, EIO, ENOSPC or EROFS."""
        (self.control / fault).touch()
        try:
            yield
        finally:
            (self.control / fault).unlink()

    def die(self):
        """The program ends: from now on every call fails."""
        self._process.kill()
        self._process.wait()

    def close(self):
        for each in self.control.iterdir():
            each.unlink()
        self.die()
        subprocess.run(["umount", "--lazy", self.path], check=True)


def run(*command):
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)


def _fill(file):
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _no_ext4():
    if os.geteuid():
        return "needs root"
    for tool in ("mkfs.ext4", "mount", "umount", "fsfreeze"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    return _no_mounts() or (None if Path("/dev/loop-control").exists() else "there is no /dev/loop-control")


def _no_fuse():
    if os.geteuid():
        return "needs root"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    if not shutil.which("gcc") or not shutil.which("pkg-config"):
        return "gcc or pkg-config is not installed"
    if subprocess.run(["pkg-config", "fuse3"]).returncode:
        return "libfuse3-dev is not installed"
    return _no_mounts()


def _no_mounts():
    """In a container root may lack what mount(2) needs: CAP_SYS_ADMIN."""
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    return None if int(effective.split()[1], 16) >> 21 & 1 else "may not mount"


def _built(folder):
    program, source = folder / "faulty-program", Path(__file__).with_name("faulty.c")
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True)
    run("gcc", "-o", program, source, *flags.stdout.split())
    return program
