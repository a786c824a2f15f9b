"""The documentation builds as a site without a warning, with a page for each kind of finding."""

import os
import re
import subprocess

import pytest
import warm_python
from page_blocks import ROOT

from gradwatch.detect import detectors


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [*warm_python.command(), "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True, env=environment
    )

    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def test_each_kind_of_finding_has_a_page_with_a_picture(site):
    for detector in detectors():
        page = (site / "reference" / "generated" / "faults" / f"{detector.code}.html").read_text()

        assert f"{detector.code} {detector.kind}" in page
        drawn = re.search(r'<svg class="fault".*?</svg>', page, re.S)
        assert drawn, detector.kind
        assert page.count("<h2>") >= 5, "what, why, when it is wrong, what to do, thresholds"
        assert len(re.findall(r"<(?:rect|polyline|circle)", drawn[0])) >= 4, "two frames, and something in each"


def test_each_statement_of_llms_txt_leads_to_a_page(site):
    links = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())

    assert links
    assert [link for link in links if not (site / link).is_file()] == []


def test_no_page_shows_a_link_to_a_source_page(site):
    """Such a link would be dead: the build turns it into a link to a page, or takes it out."""
    pages = [path for path in site.rglob("*.html") if re.search(r'href="[^"]+\.md["#]', path.read_text())]

    assert pages == []


def test_the_reference_has_every_public_name_and_command(site):
    python = (site / "reference" / "python.html").read_text()
    commands = (site / "reference" / "cli.html").read_text()

    for name in ("watch", "Monitor", "Schedule", "locate", "incidents", "load_run", "Run", "Finding", "curvature"):
        assert f'id="gradwatch.{name}"' in python
    for name in ("train", "diagnose", "replay", "runs", "compare", "list", "explain", "schema"):
        assert f"gradwatch {name}" in commands
