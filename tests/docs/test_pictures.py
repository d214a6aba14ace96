"""The pictures of the pages show the committed results."""

import re
import sys

import pytest
from examples_of_pages import DOCS, ROOT, pages

sys.path.insert(0, str(DOCS))

import draw_pictures


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
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for text in (
        f"{torch['extra B/element']:.0f} bytes of extra memory per weight",
        f"yes, {ranking['extra B/element']:.2f} bytes",
        f"a global pruning is {torch['ms'] / call['ms']:.0f} times faster than torch's",
        f"and {ranks['times']:.0f} times faster than gathering on 2 ranks of FSDP2",
        f"{ranks['extra bytes per local element']:.2f} to {ranking['extra B/element']:.2f} bytes",
    ):
        assert text in readme, text
