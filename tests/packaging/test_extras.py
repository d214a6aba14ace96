"""Commands of the README and the documentation run with just the extras that they name.

An environment has links to the packages that an extra needs, and to what these need, and to nothing
else of the environment that runs the tests.
"""

import contextlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from examples_of_pages import ROOT, commands_of, pages
from small_commands import made_small, write_sources

from helpers.forked_scripts import environment, output_of


def needed_by(extras):
    """The names of the distributions that distprune needs with some extras."""
    found, seen, left = {}, set(), [("distprune", frozenset(extras))]
    while left:
        name, its_extras = left.pop()
        if (name, its_extras) in seen:
            continue
        seen.add((name, its_extras))
        try:
            found[canonicalize_name(name)] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for text in found[canonicalize_name(name)].requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *its_extras)):
                left.append((requirement.name, frozenset(requirement.extras)))
    return found


@pytest.fixture(scope="module")
def python_with(tmp_path_factory):
    """python_with(extras) -> a Python that has only what they bring."""
    made = {}

    def make(extras):
        if extras in made:
            return made[extras]
        folder = tmp_path_factory.mktemp("only") / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (place,) = (folder / "lib").glob("python*/site-packages")
        for distribution in needed_by(extras).values():
            names = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
            for name in names:
                if not (place / name).exists() and not name.startswith("__editable__"):
                    (place / name).symlink_to(distribution.locate_file(name))
        if not (place / "distprune").exists():
            (place / "distprune").symlink_to(ROOT / "distprune")
        made[extras] = folder / "bin" / "python"
        return made[extras]

    return make


def extras_of(words):
    """What the documentation says that a command needs."""
    if "selftest" in words:
        return ()
    if "--plot" in words:
        return "cli", "plot"
    by_weights = {"--score", "--scores", "--statistics", "--discard"}
    if words[0] in ("eval", "calibrate", "write-text", "shrink") or (
        words[0] in ("prune", "plan") and by_weights.isdisjoint(words)
    ):
        return "cli", "language-models"
    return ("cli",)


def run(python, arguments, folder):
    """Run a command of distprune, made small."""
    with contextlib.chdir(folder):
        words = ["distprune", *(arguments if "selftest" in arguments else made_small(arguments))]
    variables = environment()
    del variables["PYTHONPATH"]
    code = 3 if "--exit-code" in words else 0
    output_of(python, "-m", *words, code=code, cwd=folder, env=variables)


def commands_of_ours(page):
    """The arguments of distprune in the commands of a page."""
    for _place, words in commands_of(page):
        if words[0] == "distprune" or (words[0] in ("torchrun", "python") and "distprune" in words):
            yield words[words.index("distprune") + 1 :]


PAGES = [page for page in pages() if any(commands_of_ours(page))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_sources(folder)
    return folder


@pytest.mark.slow
def test_the_command_of_the_readme(python_with, files, tmp_path):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    commands = commands_of_ours(ROOT / "README.md")
    arguments = next(each for each in commands if each[0] == "prune" and "--eval" in each)
    python = python_with(("cli", "language-models"))
    run(python, arguments, tmp_path)
    output_of(python, "-c", "import hypothesis", code=1)  # it is no copy of this environment


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page(page, python_with, files, tmp_path):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    for arguments in commands_of_ours(page):
        run(python_with(extras_of(arguments)), arguments, tmp_path)


# Examples of a library that no extra brings: the page with this name says how to install it.
OF_OTHERS = ("prune_ray.py", "prune_torchtitan.py")
PROGRAMS = [
    program
    for folder in ("examples", "launch")
    for program in sorted((ROOT / folder).glob("*.py"))
    if program.name not in OF_OTHERS
]


@pytest.mark.parametrize("program", OF_OTHERS)
def test_a_page_says_how_to_install_the_library_of_an_example(program):
    text = (ROOT / "docs" / "tutorials" / "torchrun.md").read_text()
    assert "pip install" in text and program in text


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_import_what_their_extra_brings(program, python_with):
    extras = ("language-models",) if "language_model" in program.name else ("examples",)
    if "lora" in program.name:
        extras = ("examples", "peft")
    code = f"import runpy, sys; sys.path.insert(0, {str(program.parent)!r}); "
    code += f"runpy.run_path({str(program)!r}, run_name='imported')"
    output_of(python_with(extras), "-c", code)
