"""What strangers and registries find: the release, the recipe, and no invented address."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distprune import __version__ as VERSION

ROOT = Path(__file__).resolve().parents[2]
if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
else:
    PROJECT = {}
with_toml = pytest.mark.skipif(not PROJECT, reason="tomllib is in Python 3.11 and later")
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
JOBS = RELEASE["jobs"]
FILES = (
    "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "GOVERNANCE.md", "LICENSE", "SECURITY.md",
    ".github/CODEOWNERS", ".github/PULL_REQUEST_TEMPLATE.md",
)  # fmt: skip
TEXTS = {".cff", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", ""}
SKIPPED = re.compile(r"\..*|build|dist|runs|__pycache__|.*\.egg-info")


def texts():
    """(path, text) of the repository's files, as git would have them."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name == ".github" or not SKIPPED.match(name)]
        for name in names:
            path = Path(folder, name)
            if path.suffix in TEXTS and path != Path(__file__):
                yield path, path.read_text(encoding="utf-8", errors="replace")


def test_what_a_project_for_strangers_has():
    for name in FILES:
        assert (ROOT / name).read_text(encoding="utf-8").strip(), name
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text()), form


@with_toml
def test_no_address_of_the_project_is_invented():
    """[project.urls] is the one place that names them; each address elsewhere begins with one."""
    known = tuple(PROJECT.get("urls", {}).values())
    on_pypi = "https://pypi.org/packages/source/d/distprune/"
    for path, text in texts():
        for address in re.findall(r"https?://[^\s\"'<>)`]+", text):
            if "distprune" in address:
                assert address.startswith((*known, on_pypi)), (path, address)


def test_it_is_built_once_and_published_without_a_password():
    builders = [name for name, job in JOBS.items() if "python -m build" in str(job)]
    assert builders == ["build"] and RELEASE[True] == {"push": {"tags": ["v*"]}}  # YAML's "on"
    publishers = [name for name, job in JOBS.items() if "gh-action-pypi-publish" in str(job)]
    assert publishers == ["testpypi", "pypi"]
    for name, job in JOBS.items():
        assert "uses" not in job, "trusted publishing works in no reusable workflow"
        is_publisher = name in publishers
        assert job.get("permissions", {}) == ({"id-token": "write"} if is_publisher else {})
        assert job.get("environment") == (name if is_publisher else None)
    assert JOBS["testpypi"]["needs"] == ["build", "wheel"] and JOBS["pypi"]["needs"] == "testpypi"
    text = str(RELEASE)
    assert "secrets" not in text and "password" not in text and text.count("attestations") == 2


@pytest.mark.parametrize(
    ("tag", "changes", "code"),
    [
        (f"v{VERSION}", f"## {VERSION} (2026-12-01)\n", 0),
        ("v99.0.0", f"## {VERSION} (2026-12-01)\n", 1),
        (f"v{VERSION}", f"## {VERSION} (unreleased)\n", 1),
    ],
)
def test_the_tag_is_the_version(tmp_path, tag, changes, code):
    (step,) = (s for s in JOBS["build"]["steps"] if s.get("name") == "The tag is the version")
    (tmp_path / "CHANGELOG.md").write_text(changes)
    (tmp_path / "distprune").symlink_to(ROOT / "distprune")
    (tmp_path / "CITATION.cff").symlink_to(ROOT / "CITATION.cff")
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        env={**os.environ, "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert code == 0 or "expected" in done.stdout


@with_toml
def test_the_recipe_of_conda_forge_needs_what_the_project_needs():
    recipe = yaml.safe_load((ROOT / "packaging/conda-forge/recipe.yaml").read_text())
    assert recipe["context"]["version"] == VERSION
    assert PROJECT["requires-python"] == f">={recipe['context']['python_min']}"
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cli"]]
    renamed = {re.sub("^torch", "pytorch", each).lower().replace(" ", "") for each in needed}
    run = {each.replace(" ", "") for each in recipe["requirements"]["run"][1:]}
    assert run == renamed
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["context"]["repository"] == PROJECT.get("urls", {}).get("Repository", "")
