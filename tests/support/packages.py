"""Installed packages of others, of which nothing is there but their entry points."""


def install(folder, monkeypatch, group, points):
    """Make a package with these entry points, by name, found from now on; its files are in `folder`."""
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(folder)
