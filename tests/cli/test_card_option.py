"""--no-card, and output.card of a recipe, leave README.md as it is in the source."""

import torch
import yaml

from helpers.tiny_checkpoints import save, tree_digest

CARD = "---\nlicense: mit\n---\nThe card.\n"


def test_the_card_can_be_left_as_it_is(run, tmp_path):
    source = save(tmp_path / "source", {"a.weight": torch.randn(8, 8)})
    (source / "README.md").write_text(CARD)
    assert run("prune", source, tmp_path / "with", "-s", "0.5").code == 0
    assert "pruned by distprune" in (tmp_path / "with" / "README.md").read_text()
    assert run("prune", source, tmp_path / "out", "-s", "0.5", "--no-card").code == 0
    assert (tmp_path / "out" / "README.md").read_text() == CARD
    assert run("verify", tmp_path / "out", "--against", source).code == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nsparsity: 0.5\noutput: {card: false}\n")
    assert run("prune", source, tmp_path / "again", "-r", recipe).code == 0
    assert (tmp_path / "again" / "README.md").read_text() == CARD
    assert run("prune", source, tmp_path / "over", "-r", recipe, "--card").code == 0
    assert (tmp_path / "over" / "README.md").read_text() != CARD
    assert yaml.safe_load((tmp_path / "out" / "distprune" / "recipe.yaml").read_text())[
        "output"
    ] == {"masks": True, "card": False}


def test_the_command_in_the_card_makes_the_same_checkpoint(run, tmp_path):
    source = save(tmp_path / "source", {"a.weight": torch.randn(8, 8), "b.weight": torch.eye(8)})
    first, second = tmp_path / "first", tmp_path / "second"
    assert run("prune", source, first, "-s", "0.3", "--scope", "row", "--exclude", "b.*").code == 0
    assert "prune SRC DST -r distprune/recipe.yaml" in (first / "README.md").read_text()
    recipe = first / "distprune" / "recipe.yaml"
    assert run("prune", source, second, "-r", recipe).code == 0
    left_out = ("distprune/run.json",)
    assert tree_digest(first, left_out) == tree_digest(second, left_out)


def test_plan_says_that_the_card_is_not_copied(run, tmp_path):
    source = save(tmp_path / "source", {"a.weight": torch.randn(8, 8)})
    (source / "README.md").write_text(CARD)
    copied = run("plan", source, "-s", "0.5", "--json").json["copied"]
    assert copied == ["config.json", "tokenizer.json"]
