"""The documentation builds without a warning, lacks no public name, and shows a short path."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from examples_of_pages import DOCS, ROOT, pages

import distprune
from helpers.forked_scripts import environment, output_of, run_forked

sys.path.insert(0, str(DOCS))

import draw_pictures
import help_of_commands
import session_of_commands

MAX_FRAMES = 15  # from global_unstructured to any kernel
MODULES = ("budgets", "criteria", "dynamic", "schedule", "statistics", "checkpoint", "testing")
PACKAGE = ROOT / "distprune"
NOT_OF_THE_REPOSITORY = {"DST/distprune/", "build/", "dist/", "test_pruning.py", "torch.py"}


def test_every_public_name_is_in_the_api():
    documented = set()
    for page in (DOCS / "api").glob("*.md"):
        documented.update(re.findall(r"^::: distprune\.(\S+)$", page.read_text(), re.MULTILINE))
    public = {name for name in distprune.__all__ if name not in MODULES}
    for module in MODULES:
        names = importlib.import_module(f"distprune.{module}").__all__
        public |= {f"{module}.{name}" for name in names}
    assert public <= documented, public - documented


def test_files_that_the_documentation_names_exist():
    """A path is of the repository or the package; a bare name is of a file in those."""
    named = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|sh|cff|txt)|(?:[\w.-]+/)+)`")
    bare = {path.name for path in (*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.*"))}
    for page in (ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))):
        for path in named.findall(page.read_text()):
            is_known = (ROOT / path).exists() or (PACKAGE / path).exists() or path in bare
            assert is_known or path in NOT_OF_THE_REPOSITORY, (page, path)


@pytest.mark.slow
def test_the_path_of_a_call_is_short():
    code, text = run_forked(DOCS / "trace_of_a_call.py")
    assert code == 0, text
    lengths = text.partition("frames to each kernel")[2].partition("files of the package")[0]
    frames = re.findall(r"^ *(\d+)  (\w+)$", lengths, re.MULTILINE)
    assert "scan" in [kernel for _, kernel in frames], text
    assert max(int(count) for count, _ in frames) <= MAX_FRAMES, text


def test_links_of_the_readme_lead_to_pages_and_headings():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        file, _, anchor = target.partition("#")
        assert (ROOT / file).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
            words = (re.sub(r"[^\w\s-]", "", title).split() for title in headings)
            assert anchor in {"-".join(title).lower() for title in words}, target


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet counts no warning
    variables = environment(NO_MKDOCS_2_WARNING="1")
    output_of(*command, "--site-dir", tmp_path, cwd=ROOT, env=variables)
    page = (tmp_path / "how_it_works.html").read_text()
    assert "frames from global_unstructured to the kernel" in page
    assert "L1Unstructured.decide" in page
    for page in tmp_path.rglob("*.html"):
        elsewhere = re.findall(
            r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(https?:[^">]+)', page.read_text()
        )
        assert not elsewhere, page


def test_lines_of_code_blocks_fit_the_pages():
    """Longer ones are cut off in a window of 1,400 pixels (docs/assets/wide.css)."""
    for page in pages():
        for block in re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.splitlines():
                assert len(line) <= 106, (page, line)
    assert max(help_of_commands.WIDTH, session_of_commands.WIDTH) <= 106


# The diffs of docs/extending.md apply to the package, touch few files, and do what they say.


DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
OPTION = """
from torch import nn
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
recipe = Recipe(sparsity=0.5, prefix="stage")
assert recipe.as_values()["prefix"] == "stage"
(pair,) = ScheduledPruner.from_recipe(nn.Linear(4, 4), recipe).parameters
assert pair.fqn == "stage.weight"
"""
SCORE = """
import torch
import distprune as prune
layer = torch.nn.Linear(4, 1)
layer.weight.data = torch.tensor([[0.0, 1.0, -1.0, 1.5]])
prune.global_unstructured([(layer, "weight")], prune.FarFromOne, amount=2)
assert layer.weight_mask.tolist() == [[0, 1, 0, 1]]
"""


def test_the_diffs_apply_and_work(tmp_path):
    shutil.copytree(Path(distprune.__file__).parent, tmp_path / "distprune")
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=tmp_path)
        assert 1 < diff.count("\n+++ ") + diff.startswith("+++ ") <= 3
    assert len(DIFFS) == 2
    output_of(sys.executable, "-c", OPTION + SCORE, cwd=tmp_path)


# The pictures of the pages show the committed results.


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_a_picture_is_what_the_command_draws(name):
    drawn = str(draw_pictures.PICTURES[name]())
    assert (draw_pictures.FOLDER / name).read_text(encoding="utf-8") == drawn, (
        "run `python docs/draw_pictures.py`"
    )


def test_every_picture_is_on_a_page_with_a_text_in_its_place():
    shown = set()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            file = (page.parent / target).resolve()
            assert file.is_file(), (page, target)
            assert len(words.split()) >= 8, f"{page}: {target} needs an alternative text"
            shown.add(file)
    assert shown == set(draw_pictures.FOLDER.iterdir()), (ROOT, shown)


def test_figures_of_the_readme_are_those_of_the_results():
    """Its sentence on perplexity has a test of its own (test_language_model_table.py)."""
    table = draw_pictures.table_of_performance(
        "One process, 100.0M float32 weights in 111 tensors, amount 0.5"
    )
    torch, call, ranking = (
        next(row for row in table if row[""] == name)
        for name in (
            "torch.nn.utils.prune, the whole call",
            "distprune, the whole call",
            "distprune, ranking and masks",
        )
    )
    (ranks,) = draw_pictures.measured_on([2])
    extra = max(ranks["extra bytes per local element"], ranking["extra B/element"])
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for text in (
        f"{torch['extra B/element']:.0f} bytes of extra memory per weight",
        f"yes, {ranking['extra B/element']:.2f} bytes",
        f"a global pruning is {torch['ms'] / call['ms']:.0f} times faster than torch's",
        f"and {ranks['times']:.0f} times faster than gathering on 2 ranks of FSDP2",
        f"at most {extra:.2f} bytes of extra memory per local element",
    ):
        assert text in readme, text
