"""Run the cases of unedited scripts in processes of their own: they replace functions of torch for a whole process."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["script_watch_cases.py", "script_cases.py"])
def test_all_cases_pass_in_a_process_of_their_own(name, tmp_path):
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, f"--basetemp={tmp_path / 'cases'}"]

    done = subprocess.run([*command, str(Path(__file__).with_name(name))], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-6000:]
