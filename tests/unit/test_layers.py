"""Imports point down, private torch fields stay in their adapters, and one place communicates."""

import ast
import re
from pathlib import Path

import pytest

import distprune

PACKAGE = Path(distprune.__file__).parent
# Every module imports lower levels only; a package's level is that of its __init__.
LEVELS = [
    ["recipes"],
    ["api"],
    ["methods"],
    ["call"],
    ["masks"],
    ["selection"],
    ["shards"],
    ["torch_private"],
    ["_common"],
    ["files", "files.errors", "_common.natural_order", "_common.memory", "_common.exclusive"],
    [
        "_common.hashing",
        "_common.amount",
        "_common.bounds",
        "shards.geometry",
        "_common.collectives",
        "_common.naming",
        "call.report",
        "schedule.functions",
    ],
    ["torch_private.live_graphs"],
    [
        "files.header",
        "files.recipe",
        "_common.lost",
        "_common.product",
        "torch_private.private_fields",
    ],
    ["files.checkpoint"],
    ["files.policy"],
    ["files.planning"],
    [
        "recipes.strict",
        "shards.shard",
        "selection.keys",
        "masks.record",
        "masks.survival",
        "torch_private.errors",
        "torch_private.fsdp1_mask",
        "testing.calls",
    ],
    [
        "torch_private.dcp",
        "torch_private.ddp",
        "torch_private.fsdp1",
        "torch_private.fsdp2",
        "testing.worker",
    ],
    [
        "selection.kernels",
        "shards.checksum",
        "masks.fingerprint",
        "call.context",
        "shards.target",
        "shards.dtensor",
        "shards.flat",
        "shards.replicated",
    ],
    ["torch_private.wrapper", "torch_private.live_property", "testing.pool", "selection.passes"],
    ["files.scores", "files.disk", "files.team"],
    ["files.groups", "files.streaming", "files.masks"],
    ["files.units"],
    ["files.scanning"],
    ["files.inspecting", "files.comparing"],
    ["files.deciding"],
    ["files.report", "files.rewriting"],
    ["files.partial"],
    ["files.pruning", "files.verifying"],
    ["files.applying"],
    [
        "shards.reader",
        "selection.search",
        "call.pipeline_parallel",
        "masks.hook",
        "testing",
    ],
    [
        "call.within_bounds",
        "api.checkpoint_ties",
        "masks.checks",
        "masks.loading",
        "call.score_keys",
        "api.select",
        "masks.writable",
    ],
    ["call.reading"],
    ["call.ranking", "masks.attach"],
    ["verification.report"],
    ["methods.structured", "call.run", "api.wrap_later"],
    ["api.pretrained", "methods.base"],
    ["methods.builtin"],
    ["api.local", "api.global_unstructured", "schedule.groups"],
    ["verification.measuring", "verification.structure", "verification.records"],
    ["verification.sharing"],
    ["verification.reference"],
    ["verification.expectations"],
    ["verification.verifying", "verification"],
    ["schedule.pruner", "checkpoint", "api.mask_files"],
    ["schedule"],
    ["recipe"],
    ["integrations", "integrations.accelerate", "integrations.transformers"],
    ["_public"],
    [""],
    ["selftest", "selftest.table", "selftest.ranks", "selftest.models"],
    ["selftest.comparing"],
    ["selftest.checks"],
    ["selftest.running"],
    ["cli.exits", "cli.console", "cli.options", "cli.schema", "cli.plotting"],
    ["cli.ranks", "cli.progress"],
    ["cli.environment", "cli.recipes"],
    ["cli.choosing"],
    ["cli.planning"],
    ["cli.pruning", "cli.looking", "cli.verifying", "cli.selftesting"],
    ["cli.applying"],
    ["cli.app"],
    ["cli.main", "cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("distprune.") in FILES
                found.add(inner if is_module else node.module)
    return {
        name.removeprefix("distprune").removeprefix(".")
        for name in found
        if name.split(".")[0] == "distprune"
    }


def test_every_module_has_a_level():
    assert set(LEVEL) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    for other in imported(FILES[name]):
        assert LEVEL[other] < LEVEL[name], f"{name or '__init__'} may not import {other}"


@pytest.mark.parametrize("name", FILES)
def test_one_place_communicates(name):
    calls = re.findall(
        r"\b(all_reduce|all_gather\w*|broadcast\w*|reduce_scatter\w*|gather_object|barrier|"
        r"scatter|scatter_object_list|full_tensor|redistribute)\(",
        re.sub(r'"[^"\n]*"', "", FILES[name].read_text()),
    )
    # What users test their own code with is no part of any pruning.
    assert not calls or name == "_common.collectives" or name.startswith("testing"), calls


@pytest.mark.parametrize("name", FILES)
def test_private_wrapper_fields_live_in_their_adapter(name):
    private = re.findall(
        r"\b(_get_fsdp_state|_fsdp_param_groups?|_module_info|_sharded_\w+|_init_extensions|"
        r"_composable_state|_active_ddp_module|parameters_to_ignore|_assign_modules_buffers|_fsdp_flattened|"
        r"_local_tensor|_handle\b(?=\.)|_param_infos|_inter_node_pg|_local_shard|_flat_param)\b",
        FILES[name].read_text(),
    )
    assert not private or name.startswith("torch_private."), private


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_taken_from_torch_prune(name):
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        assert not [n for n in names if n.startswith("torch.nn.utils.prune")]
