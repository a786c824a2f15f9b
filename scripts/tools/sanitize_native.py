"""Run the tests of the C code under sanitizers: `python scripts/tools/sanitize_native.py`.

A copy of the working tree is built with gcc's `-fsanitize=address,undefined`, and tested there. Python is none the
wiser, so both runtimes are loaded before it, and leaks, which it has by design, are not counted. What a sanitizer says
is printed, and ends this with 1. Takes some minutes; other tests may be named. Needs Linux and gcc with its sanitizers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = "-fsanitize=address,undefined -fno-omit-frame-pointer -g -O1"
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
"""Loaded first, with the runtime of C++: the sanitizer must know it to follow the exceptions that torch throws."""
BUILD = "from setuptools import setup; setup()"
TESTS = (
    "tests/end_to_end/watch/test_fast_path.py",
    *(
        f"tests/probe/{name}.py"
        for name in (
            "activations/test_accumulator",
            "activations/test_probe",
            "batches/test_batch_hash",
            "batches/test_repeated_samples",
            "device/test_backend",
            "gradients/test_histograms",
            "gradients/test_statistics",
            "updates/test_from_copy",
            "updates/test_from_moments",
        )
    ),
)
REPORT = re.compile(r"^.*(?:runtime error:|ERROR: AddressSanitizer).*$", re.MULTILINE)


def copy(folder: Path) -> None:
    """Copy what git tracks, as it is now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["cp", "--parents", "-t", folder, *names.decode().rstrip("\0").split("\0")], cwd=ROOT, check=True)


def runtime(name: str) -> str:
    """Return where gcc has one of its libraries."""
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


def build(folder: Path) -> None:
    """Build the extension with the sanitizers in it."""
    command = [sys.executable, "-c", BUILD, "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"CC": "gcc", "CFLAGS": FLAGS})


def test(folder: Path, tests: list[str]) -> int:
    """Run tests on it, and return what to exit with."""
    log = folder / "sanitizers"
    settings = {"LD_PRELOAD": " ".join(runtime(name) for name in RUNTIMES), "PYTHONPATH": f"{folder}"}
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):
        settings[name] = f"detect_leaks=0:print_stacktrace=1:log_path={log}"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "no:faulthandler", *tests]
    status = subprocess.run(command, cwd=folder, env=os.environ | settings).returncode
    told = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("sanitizers.*")))
    print(told, end="")
    found = sorted(set(REPORT.findall(told)))
    print(f"{len(found)} reports of the sanitizers", *found, sep="\n")
    return 1 if found else status


def main() -> None:
    """Copy, build and test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="tests, if not those of the C code")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        build(Path(folder))
        sys.exit(test(Path(folder), options.tests))


if __name__ == "__main__":
    main()
