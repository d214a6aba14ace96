"""Imports point down, private torch fields stay in their adapters, and one place communicates."""

import ast
import graphlib
import re
from pathlib import Path

import distprune

PACKAGE = Path(distprune.__file__).parent
# The rooms of the package, and those that each may import. Top-level modules are rooms too.
ROOMS = {
    "base": set(),
    "ranks": set(),
    "wrappers": {"base", "ranks"},
    "shards": {"base", "ranks", "wrappers"},
    "ranking": {"base", "ranks", "shards"},
    "masks": {"base", "wrappers", "shards"},
    "budgets": {"base", "ranks", "ranking", "shards"},
    "call": {"base", "ranks", "shards", "ranking", "masks"},
    "methods": {"base", "ranks", "shards", "ranking", "masks", "call"},
    "_version": set(),
    "_transformers": {"base"},
    "recipes": {"base"},
    "files": {"base", "ranks", "_version", "recipes", "shards", "ranking", "budgets"},
    "api": {
        "base", "ranks", "wrappers", "_transformers", "shards", "masks", "call", "methods",
        "files",
    },
    "verification": {"base", "ranks", "wrappers", "shards", "masks", "call"},
    "schedule": {
        "base", "ranks", "budgets", "shards", "ranking", "masks", "call", "methods", "api",
        "recipes",
    },
    "criteria": {"base", "ranks", "wrappers", "shards", "call", "methods", "files"},
    "statistics": {
        "base", "ranks", "wrappers", "shards", "ranking", "call", "files", "budgets", "criteria",
    },
    "reconstruction": {"base", "ranks", "shards", "masks", "call", "statistics"},
    "checkpoint": {"base", "ranks", "wrappers", "shards", "masks", "methods", "api"},
    "layouts": {"wrappers"},
    "dynamic": {"base", "ranks", "wrappers", "shards", "masks", "call", "api"},
    "integrations": {
        "base", "ranks", "wrappers", "masks", "call", "api", "verification", "schedule",
        "checkpoint", "criteria", "recipes", "files",
    },
    "language_models": {
        "base", "ranks", "wrappers", "_transformers", "shards", "call", "checkpoint",
        "methods", "api", "files", "criteria", "statistics", "reconstruction",
    },
    "streaming": {
        "base", "ranks", "_transformers", "_version", "api", "criteria", "files", "language_models",
        "recipes", "reconstruction", "statistics",
    },
    "_public": {
        "base", "wrappers", "shards", "budgets", "call", "methods", "api", "verification",
        "schedule", "checkpoint", "criteria", "statistics", "reconstruction", "dynamic",
    },
    "": {"_public", "_version"},
    "testing": {"ranks"},
    "selftest": {"base", "ranks", "wrappers", ""},
    "cli": {
        "base", "ranks", "files", "recipes", "selftest", "language_models", "streaming", "",
    },
    "__main__": {"cli"},
}  # fmt: skip
# The rooms of ``files``: each may import those before it. Its commands come last.
FILES_ROOMS = [
    "errors", "disk", "checkpoint", "mask_files", "selecting", "statistics_file",
    "planning", "team", "ranked", "reports", "pruning",
]  # fmt: skip
FILES_COMMANDS = {"verifying"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


TEXTS = {name: path.read_text() for name, path in FILES.items()}


def imported_names(text: str) -> set[str]:
    """What a file imports, inside functions too: ``from a import b`` is ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str:
    """The module of this package that has an imported name."""
    inner = name.removeprefix("distprune").removeprefix(".")
    return inner if inner in FILES else inner.rpartition(".")[0]


NAMES = {name: imported_names(text) for name, text in TEXTS.items()}
IMPORTS = {
    name: {module_of(each) for each in names if each.split(".")[0] == "distprune"}
    for name, names in NAMES.items()
}


def room_of(name: str) -> str:
    return name.partition(".")[0]


def test_rooms_import_only_the_rooms_that_they_may():
    imports = {(room_of(name), room_of(other)) for name in FILES for other in IMPORTS[name]}
    wrong = [(a, b) for a, b in imports if a != b and b not in ROOMS[a]]
    unused = [(a, b) for a in ROOMS for b in ROOMS[a] if (a, b) not in imports]
    assert not wrong and not unused, (wrong, unused)


def test_rooms_of_files_import_only_the_rooms_before_them():
    level = {room: i for i, room in enumerate(FILES_ROOMS)} | dict.fromkeys(FILES_COMMANDS, 99)
    inside = {name: name.split(".")[1] for name in FILES if name.startswith("files.")}
    assert set(inside.values()) == set(level)
    wrong = [
        (name, other)
        for name, room in inside.items()
        for other in IMPORTS[name] & set(inside)
        if inside[other] != room and level[inside[other]] >= level[room]
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    """Rooms, and the modules inside them, are layers: imports lead to no circle."""
    graphlib.TopologicalSorter(IMPORTS).prepare()
    graphlib.TopologicalSorter(ROOMS).prepare()


def offenders(pattern: str, allowed: tuple[str, ...]) -> list[tuple[str, str]]:
    """(module, what it says) for each use of a pattern outside of the modules that may."""
    return [
        (name, found)
        for name, text in TEXTS.items()
        for found in re.findall(pattern, text)
        if found and not name.startswith(allowed)
    ]


def test_one_place_communicates():
    calls = (
        r"\b(?:all_reduce|all_gather\w*|all_to_all\w*|broadcast\w*|reduce_scatter\w*|gather_object|barrier|"
        r"scatter|scatter_object_list|full_tensor|redistribute)\("
    )
    # Tests, of users and of this machine, are no part of any pruning. Words in quotes are no calls.
    assert not offenders(r'"[^"\n]*"|(' + calls + ")", ("ranks.collectives", "selftest", "testing"))


def test_private_wrapper_fields_live_in_their_adapter():
    fields = (
        r"\b(?:_get_fsdp_state|_fsdp_param_groups?|_module_info|_sharded_\w+|_init_extensions|"
        r"_composable_state|_active_ddp_module|parameters_to_ignore|_assign_modules_buffers|_fsdp_flattened|"
        r"_local_tensor|_handle\b(?=\.)|_param_infos|_inter_node_pg|_local_shard|_flat_param)\b"
    )
    assert not offenders(fields, ("wrappers.",))


def test_one_place_spells_the_names_of_the_pruned_form():
    """Texts, and the ends of f-strings; two attributes of hooks are called so."""
    spelled = r'["}]\.?_(?:orig|mask)(?!\w)'
    assert not offenders(spelled, ("base.pruned_form", "masks.hook", "methods.base"))
    assert offenders(spelled, ())


def test_nothing_is_taken_from_torch_prune():
    takes = [name for name in FILES if any("torch.nn.utils.prune" in n for n in NAMES[name])]
    assert takes == ["selftest"]  # the reference that it compares training with
