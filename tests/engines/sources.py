"""Sources of other people's engines: found here, or fetched at a commit.

    python -m tests.engines.sources        fetches those that are not here, into .engines; 1 if one cannot be had

A source is looked for in the folder that ENGINE_SOURCES names, and then in .engines and in shared/engines beside this
repository: as a folder or an archive that begins with its name. What was fetched is taken only if its Python files have
the digest that is known of the commit: archives are packed anew, and their own bytes may change.
"""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ENGINE_SOURCES"
ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".engines"
BESIDE = ROOT.parent / "shared" / "engines"
GITHUB = "https://github.com"
SECONDS = 20.0  # without an answer


class CannotBeHad(Exception):
    """A sentence about a source that is neither here nor can be fetched."""


@dataclass(frozen=True)
class Source:
    """`package` is the folder whose Python files have the digest `sha256` at this commit."""

    name: str
    repository: str
    commit: str
    package: str
    sha256: str

    def url(self, host: str = GITHUB) -> str:
        return f"{host}/{self.repository}/archive/{self.commit}.tar.gz"


ATOM = Source(
    "atom",
    "ROCm/ATOM",
    "ffdf3bb5ddf8a15a64d521a2eeb3bc7438f9ac21",
    "atom",
    "7d246b61a05e2d64b27e8c7cf4a822186f418a0e48340199cabae18f0e2134b5",
)
NANO_VLLM = Source(
    "nano-vllm",
    "GeeeekExplorer/nano-vllm",
    "bb823b3e06983d71485a8e1f23715ebd87d98ef8",
    "nanovllm",
    "c97e570d3fe4851b1cf75493bbbe633d14710c4b20a50e61c637fb9cb3f54737",
)
MINI_SGLANG = Source(  # no test reads it yet
    "mini-sglang",
    "sgl-project/mini-sglang",
    "20fcd7f3c6a1898a61139fae1c97cc7a40bd8d66",
    "python/minisgl",
    "da445351682c10afbdaefb347ee237b8916877d83425d3736dc10e3abc10f044",
)
SOURCES = (ATOM, NANO_VLLM, MINI_SGLANG)


def found(source: Source) -> Path | None:
    """The folder or the archive. Raises FileNotFoundError for a folder that was named and is not there."""
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise FileNotFoundError(f"{VARIABLE} is {named}, which is no folder")
    places = [Path(named).absolute()] if named else []
    for place in (*places, FETCHED, BESIDE):
        if (place / source.name).is_dir():
            return place / source.name
        if archives := sorted(place.glob(f"{source.name}*.tar.gz")):
            return archives[0]
    return None


def why_not(source: Source) -> str:
    """The sentence about a source that is not here."""
    return f"{source.name} is not here: `make engines` fetches it, or {VARIABLE} names a folder that has it"


def home(place: Path, package: str) -> Path:
    """The folder that has this package, in a source that is a folder or an archive. Raises FileNotFoundError."""
    whole = place if place.is_dir() else _unpacked(place)
    for folder in (whole, *whole.iterdir()):
        if (folder / package).is_dir():
            return folder
    raise FileNotFoundError(f"{place} has no folder {package}")


def digest(home: Path, package: str) -> str:
    """The sha256 of the Python files of a package, with their names."""
    files = hashlib.sha256()
    for file in sorted((home / package).rglob("*.py")):
        files.update(f"{file.relative_to(home)}\n".encode() + file.read_bytes())
    return files.hexdigest()


def fetch(source: Source, folder: Path, host: str = GITHUB) -> Path:
    """Fetch a source into `folder`, whole or not at all. Raises CannotBeHad."""
    url = source.url(host)
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        archive = Path(fresh, "archive.tar.gz")
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer, archive.open("wb") as file:
                shutil.copyfileobj(answer, file)
            _extract(archive, Path(fresh, "whole"))
            here = home(Path(fresh, "whole"), source.package)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise CannotBeHad(f"{url}: {error}; or let {VARIABLE} name a folder that has {source.name}") from error
        if (other := digest(here, source.package)) != source.sha256:
            raise CannotBeHad(f"{url}: its Python files have the sha256 {other}, and not {source.sha256}")
        return here.rename(folder / source.name)


def main(folder: Path = FETCHED, host: str = GITHUB) -> int:
    """Print a line for each source: where it is, or why it cannot be had."""
    failed = 0
    for source in SOURCES:
        try:
            place = found(source) or fetch(source, folder, host)
            here = digest(home(place, source.package), source.package) == source.sha256
            print(f"{source.name}: {place}" + ("" if here else f", which is not commit {source.commit[:9]}"))
        except CannotBeHad as error:
            failed += 1
            print(f"{source.name}: CANNOT BE HAD: {error}", file=sys.stderr)
    return 1 if failed else 0


def _unpacked(archive: Path) -> Path:
    """A temporary folder with what an archive has, unpacked once."""
    whole = Path(tempfile.gettempdir()) / f"engine-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    if not whole.exists():
        with tempfile.TemporaryDirectory(dir=whole.parent) as fresh:
            _extract(archive, Path(fresh, "whole"))
            try:
                Path(fresh, "whole").rename(whole)
            except OSError:  # another process was faster
                if not whole.exists():
                    raise
    return whole


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")


if __name__ == "__main__":
    sys.exit(main())
