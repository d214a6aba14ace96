"""Results of every kind of recipe, and a way to change one and see what verify finds."""

import pytest
import torch
from kinds_of_recipes import RECIPES, tensors

from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError
from distprune.files.verifying import verify
from helpers import tiny_checkpoints
from helpers.small_work_units import small_chunks, small_units


@pytest.fixture(scope="module", params=RECIPES)
def made(request, tmp_path_factory):
    """(source, destination), made of many small pieces."""
    folder = tmp_path_factory.mktemp("mutations")
    with pytest.MonkeyPatch.context() as patch, small_units(num_elements=40):
        small_chunks(patch, 24, 50)
        recipe = RECIPES[request.param]
        dtypes = [torch.bfloat16]
        if request.param in ("global", "normalised", "layer"):
            dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
        whole = tensors(dtypes)
        if recipe.pattern:
            whole |= {"b.weight": whole["a.weight"].flip(0)}
        if recipe.nan == "keep":
            whole["a.weight"].view(torch.int16)[2, 3:5] = torch.tensor([0x7FC0, -1]).short()
        names = list(whole)
        shards = ({n: whole[n] for n in names[:2]}, {n: whole[n] for n in names[2:]})
        source = tiny_checkpoints.save(folder / "source", *shards)
        (source / "nested" / "more").mkdir(parents=True)
        (source / "nested" / "more" / "modeling_custom.py").write_text("import torch\n")
        (source / "pytorch_model.bin").write_bytes(b"stale")
        pruning.prune(planning.plan(source, recipe), folder / "target")
        assert verify(folder / "target", source).problems == ()
        yield source, folder / "target"


@pytest.fixture
def found(made):
    """Change the target and say what verify finds; afterwards the target is as it was."""
    source, target = made
    kept = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}

    def find(change):
        change(target)
        try:
            problems = verify(target, source).problems
        except CheckpointError as error:
            problems = (str(error),)
        for path in sorted(target.rglob("*"), reverse=True):
            if path not in kept and not any(path in each.parents for each in kept):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for path, raw in kept.items():
            if path.is_dir():
                path.rmdir()
            if not path.is_file() or path.is_symlink() or path.read_bytes() != raw:
                path.unlink(missing_ok=True)
                path.write_bytes(raw)
        return problems

    yield find
    assert verify(target, source).problems == ()
