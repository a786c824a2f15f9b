"""Fetch the plotting library of the report again, byte for byte: `python scripts/tools/vendor_uplot.py`.

uPlot (MIT, https://github.com/leeoniya/uPlot) draws axes, lines, cursor and zoom: 51 kB, without dependencies, made for
series over time. Nothing is built here: the files are those of the package as `npm pack` fetches it, whose digest is
checked. Needs npm.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

ASSETS = Path(__file__).parents[2] / "gradwatch" / "render" / "report" / "assets"
PACKAGE = "uplot@1.6.32"
SHA512 = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
"""Digest of the package (`npm view uplot@1.6.32 dist.integrity`)."""
FILES = {
    "package/dist/uPlot.iife.min.js": "uplot.iife.min.js",
    "package/dist/uPlot.min.css": "uplot.min.css",
    "package/LICENSE": "uplot.LICENSE",
}


def fetch() -> dict[str, bytes]:
    """Return the files by their names here, out of a package whose digest is right."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", folder, PACKAGE], check=True)
        (package,) = Path(folder).glob("*.tgz")
        found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode("ascii")
        if found != SHA512:
            raise SystemExit(f"{PACKAGE} has the digest {found}, expected {SHA512}")
        with tarfile.open(package) as archive:
            members = {name: archive.extractfile(member) for member, name in FILES.items()}
            return {name: member.read() for name, member in members.items() if member}


def main() -> None:
    """Write the files, and say which of them changed."""
    for name, data in fetch().items():
        path = ASSETS / name
        same = path.is_file() and path.read_bytes() == data
        path.write_bytes(data)
        print(f"{name}  {len(data):,} bytes  {'unchanged' if same else 'written'}")


if __name__ == "__main__":
    main()
