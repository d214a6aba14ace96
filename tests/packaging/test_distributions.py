"""A wheel and a source distribution build without network, hold what they should, and run."""

import email
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from distprune import __version__ as VERSION
from helpers.forked_scripts import environment, output_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "distprune"
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "runs",
    "*.egg-info",
)  # fmt: skip
# What the library does not need: an installation without extras lacks these.
EXTRAS = (
    "accelerate", "hypothesis", "matplotlib", "pydantic", "pytest", "rich", "safetensors",
    "click", "transformers", "yaml",
)  # fmt: skip
PRUNE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import torch
import distprune as prune

model = torch.nn.Linear(8, 8)
report = prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
print(prune.__file__, report.num_pruned)
"""
CHECKPOINT = """
import torch
from pathlib import Path
from safetensors.torch import save_file

Path("dense").mkdir()
save_file({"model.layers.0.mlp.up_proj.weight": torch.randn(16, 8)}, "dense/model.safetensors")
"""


def run(*command, cwd=None):
    """Run a program without the checkout on its path, and without network; what it printed."""
    variables = environment(PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    del variables["PYTHONPATH"]
    return output_of(*command, cwd=cwd, env=variables)


def package_files():
    """What has to be in the wheel, relative to the repository."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".yaml") or path.name == "py.typed"
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("build")
    sources = folder / "sources"
    shutil.copytree(ROOT, sources, ignore=NOT_SOURCES, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", sources)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A new environment with the wheel, and with this environment's other packages beside it."""
    _, wheel = built
    folder = tmp_path_factory.mktemp("installed") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Files named .pth in there are not followed, so an editable distprune of this environment is
    # not importable.
    Path(where, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    _, wheel = built
    assert wheel.name == f"distprune-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {name for name in names if name.startswith(f"distprune-{VERSION}.dist-info/")}
    assert names - information == package_files()
    assert f"distprune-{VERSION}.dist-info/licenses/LICENSE" in information
    assert "distprune/py.typed" in names
    assert any(name.endswith(".yaml") for name in names)


@pytest.mark.slow
def test_the_source_distribution_holds_the_package_and_what_builds_it(built):
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_metadata_says_what_is_needed(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"distprune-{VERSION}.dist-info/METADATA").decode()
        entries = archive.read(f"distprune-{VERSION}.dist-info/entry_points.txt").decode()
    metadata = email.message_from_string(text)
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == ">=3.10"
    needed = {need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need}
    assert needed == {"torch>=2.11", "numpy"}
    assert "distprune = distprune.cli:main" in entries
    assert "**One call, any sharding, the same mask.**" in metadata.get_payload()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_library_prunes_without_any_extra(installed, tmp_path):
    code = PRUNE.format(missing=EXTRAS)
    file, count = run(installed / "bin" / "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed)
    assert count == "32"


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_line_runs(installed, tmp_path):
    distprune = installed / "bin" / "distprune"
    assert run(distprune, "--version", cwd=tmp_path).strip() == VERSION
    python = installed / "bin" / "python"
    assert run(python, "-m", "distprune", "--version", cwd=tmp_path).strip() == VERSION
    run(python, "-c", CHECKPOINT, cwd=tmp_path)
    run(distprune, "prune", "dense", "sparse", "-r", "semi_structured_2_4", cwd=tmp_path)
    assert "64 of 128 elements pruned" in run(
        distprune, "verify", "sparse", "--against", "dense", cwd=tmp_path
    )


def test_the_citation_has_the_version():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


# What strangers and registries find: the release, the recipe, and no invented address.


if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
else:
    PROJECT = {}
with_toml = pytest.mark.skipif(not PROJECT, reason="tomllib is in Python 3.11 and later")
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
JOBS = RELEASE["jobs"]
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
    variables = {**os.environ, "GITHUB_REF_NAME": tag}
    printed = output_of("bash", "-e", "-c", step["run"], code=code, cwd=tmp_path, env=variables)
    assert code == 0 or "expected" in printed


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
