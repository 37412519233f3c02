"""What a stranger looks for in a project: a release, the site, and files that say what is so."""

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

import fedpfl
from fedpfl.methods import METHODS
from tests.conftest import ROOT, read_cases

sys.path.insert(0, str(ROOT / "scripts"))
import docs_site
import release

MAKEFILE = (ROOT / "Makefile").read_text()
REFUSED = """
0.3 => a version is three numbers, such as 0.3.0; got '0.3'
0.4.0 => CHANGELOG.md has no section `## 0.4.0`; write it first
0.3.0 => the checkout has changes; commit them first
"""


def test_a_release_is_refused_in_one_line(tmp_path):
    for version, message in read_cases(REFUSED):
        with pytest.raises(release.ReleaseError, match=re.escape(message)):
            release.require_ready(version, "## 0.3.0\nBefore 0.4.0\n", " M README.md\n")
    release.require_ready("0.3.0", "## 0.3.0\n", "")


def test_the_version_stands_in_one_way(tmp_path):
    """All files name the package's, and a release moves them all and nothing else."""
    assert release.read_version() == fedpfl.__version__
    for name in release.VERSIONED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    release.write_version("7.8.9", tmp_path)
    assert release.read_version(tmp_path) == "7.8.9"
    release.write_version(fedpfl.__version__, tmp_path)
    for name in release.VERSIONED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


def test_the_citation_and_the_workflows_are_whole():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version"} <= {*citation}
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for line in [
            step["run"] for job in jobs.values() for step in job["steps"] if "run" in step
        ]:
            program, *words = line.split()
            assert program == "python" or {*words} <= targets, f"{path.name}: {line}"
            assert program == "make" or (ROOT / words[0]).is_file(), f"{path.name}: {line}"


def test_a_commit_is_tried_by_what_make_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.findall(r"\$\(BIN\)/([\w ]+)", MAKEFILE.split("\nlint:")[1].split("\n\n")[0])
    entries = [hook["entry"].replace(".venv/bin/", "") for hook in hooks]
    for program in lint:
        assert any(entry.startswith(program.strip()) for entry in entries), program


def test_the_site_has_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    sections = yaml.safe_load(text)["nav"]
    entries = [entry for section in sections for part in section.values() for entry in part]
    pages = [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries]
    made = {"configuration.md", "columns.md", "commands.md", "api.md", "tables.md"}
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(pages) == sorted(written | made | {*docs_site.WRITTEN.values()})


LINKS = """
README.md => [a](docs/run.md#models) => [a](run.md#models)
docs/run.md => [a](../README.md) => [a](index.md)
docs/run.md => [a](../examples/sweep.py) => [a](source/examples/sweep.py)
docs/run.md => [a](#here) [b](https://x.org/y) => [a](#here) [b](https://x.org/y)
"""


@pytest.mark.parametrize(("page", "link", "adapted"), read_cases(LINKS))
def test_links_lead_to_the_sites_pages(page, link, adapted):
    assert docs_site.adapt_links(page, link) == adapted


def test_generated_pages_say_what_is_so():
    configuration = docs_site.make_configuration_page()
    assert "finetune_epochs: 0 # also judge copies" in configuration
    assert "### dataset=cifar100" in configuration
    assert "| `accuracy_worst10` |" in docs_site.make_columns_page()
    pages = dict(docs_site.make_method_pages())
    assert {*pages} == {f"methods/{name}.md" for name in METHODS}
    page = pages["methods/fedper.md"]
    assert "(../design.md#a-method)): `init`, `start`, `finish`.\n" in page
    board = pages["methods/seqfededt.md"].split("## On the board")[1]
    digits = "| Digits, Dir(0.1) | 1.5 | 97.76 | 97.61 | 95.04 | 20.83 | 2.01 |"
    assert digits in board


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path):
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/methods/fedobp.html").is_file()
