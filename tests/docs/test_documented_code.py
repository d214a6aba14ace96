"""Every Python block of the README and the documentation runs; what their commands name exists."""

import ast
import os
import re
import sys

import pytest
from examples_of_pages import DOCS, ROOT, blocks_of, commands_of, pages, run_blocks, write_files

from distprune.testing import run_ranks
from helpers.forked_scripts import environment, output_of

MOST_SKIPPED = 1
PYTHON = [page for page in pages() if blocks_of(page, "python")]
SHELL = [page for page in pages() if blocks_of(page, "bash", "console", "sh")]
TESTS_OF_PROGRAMS = "launch/test_examples.py", "integrations/test_torchtitan.py"
TESTED_PROGRAMS = "".join((ROOT / "tests" / path).read_text() for path in TESTS_OF_PROGRAMS)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path):
    """A current folder for examples, with what they read of the checkout."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


@pytest.fixture
def clean_process(monkeypatch):
    """What an example leaves in the environment, and in accelerate, is taken back."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_python_blocks_run(page, folder, clean_process):
    blocks = [
        block
        for block in blocks_of(page, "python")
        if block.included_file is None and not block.how.startswith(("skip:", "file="))
    ]
    write_files(blocks, folder)
    for num_ranks in sorted({block.num_ranks for block in blocks}):
        ours = [block for block in blocks if block.num_ranks == num_ranks]
        if num_ranks == 1:
            run_blocks(ours, folder)
        else:
            run_ranks(run_blocks, num_ranks, ours, folder)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_blocks_that_are_test_files_pass(page, tmp_path):
    for block in blocks_of(page, "python"):
        if block.how.startswith("file="):
            (tmp_path / block.how.removeprefix("file=")).write_text(block.code)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
            output_of(*command, cwd=tmp_path, env=environment())


@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_python_blocks_parse_and_programs_in_them_are_tested(page):
    for block in blocks_of(page, "python"):
        if block.included_file is None:
            ast.parse(block.code, block.page)
        else:
            assert (ROOT / block.included_file).is_file(), block
            assert os.path.basename(block.included_file) in TESTED_PROGRAMS, (
                f"{block}: {block.included_file} is not run by {' or '.join(TESTS_OF_PROGRAMS)}"
            )


def test_few_blocks_are_skipped_and_each_says_why():
    skipped = [
        block
        for page in PYTHON
        for block in blocks_of(page, "python")
        if block.how.startswith("skip:")
    ]
    assert len(skipped) <= MOST_SKIPPED, [str(block) for block in skipped]
    assert all(len(block.how.removeprefix("skip:").split()) >= 4 for block in skipped)


@pytest.mark.parametrize("page", SHELL, ids=name_of)
def test_targets_extras_and_programs_exist(page):
    for place, words in commands_of(page):
        problem = problem_of(words)
        assert problem is None, f"{place}: {' '.join(words)}: {problem}"


def problem_of(words):
    """What is wrong with a command; None if nothing is. test_documented_commands.py runs it."""
    match words:
        case ["make", *targets]:
            return problem_of_make(targets)
        case ["pip", "install", *_, what] if what != "lm-eval":
            return problem_of_install(what)
    programs = [word for word in words if word.startswith(("examples/", "launch/", "tests/"))]
    missing = [path for path in programs if not (ROOT / path).exists()]
    return f"no {', '.join(missing)}" if missing else None


def problem_of_make(words):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    unknown = [word for word in words if "=" not in word and word not in targets]
    return f"no target {', '.join(unknown)}" if unknown else None


def problem_of_install(what):
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    match = re.fullmatch(r"(?:-e )?\.(?:\[([\w,-]+)\])?", what)
    if match is None:
        return "the project is installed from a checkout: pip install ."
    known = re.findall(r"^([\w-]+) = ", extras, re.MULTILINE)
    unknown = set((match[1] or "").split(",")) - {"", *known}
    return f"no extra {', '.join(unknown)}" if unknown else None


def test_a_wrong_command_is_noticed():
    assert problem_of(["make", "tets"])
    assert problem_of(["pip", "install", ".[clii]"])
    assert problem_of(["launch/torchrun.sh", "examples/nothing.py"])


def test_the_documents_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    texts = [page.read_text() for page in DOCS.rglob("*.md")]
    assert len(texts) <= 32
    assert sum(len(text.split()) for text in texts) <= 24_000


def test_no_page_is_missing_from_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [
        page for page in DOCS.rglob("*.md") if f"{page.relative_to(DOCS)}\n" not in navigation
    ]
    assert not missing
