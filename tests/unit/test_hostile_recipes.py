"""Recipes that are no recipes, or meant to harm: refused quickly, with the file's name."""

import time

import pytest

from distprune.recipe import load_recipe

pytest.importorskip("yaml")

BOMB = "version: 1\na: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(9 * ['*' + old])}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HEAD = b"version: 1\nsparsity: 0.5\n"
FILES = {
    "alias bomb": (BOMB.encode(), "line 3: an alias"),
    "reference to itself": (b"version: 1\nselect: &a {include: *a}\n", "line 2: an alias"),
    "list in itself": (b"&a [*a]", "line 1: an alias"),
    "merge": (b"a: &a {x: 1}\nb:\n  <<: *a\n", "line 3: an alias"),
    "NUL": (HEAD + b"seed: \x00\n", "special characters are not allowed"),
    "NUL at the end": (HEAD + b"\x00" * 100, "special characters are not allowed"),
    "escape": (HEAD + b"# \x1b[2J\n", "special characters are not allowed"),
    "binary": (bytes(range(256)) * 10, "is no text in UTF-8"),
    "UTF-16": ("version: 1".encode("utf-16"), "is no text in UTF-8"),
    "large": (HEAD + b"#" * 1_000_000, "has more than 1,000,000 bytes"),
    "deep list": (b"[" * 100_000, "nested more than"),
    "deep mapping": (b"{a: " * 50_000, "nested more than"),
    "deep block": (b"- " * 50_000, "nested more than"),
    "deep keys": (b"? " * 50_000, "nested more than"),
    "code": (b"version: !!python/object/apply:os.getpid []\n", "version: Input should be 1 or 2"),
    "code in a text": (b'version: !!python/name:os.getpid "x"\n', "python/name:os.getpid"),
    "no date": (HEAD + b"seed: 2001-99-99\n", "seed: cannot be read"),
    "no number": (HEAD + b"seed: !!int x\n", "seed: cannot be read"),
    "no boolean": (HEAD + b"seed: !!bool x\n", "seed: cannot be read"),
    "no timestamp": (HEAD + b"seed: !!timestamp x\n", "seed: cannot be read"),
    "many digits": (HEAD + b"seed: " + b"1" * 5000 + b"\n", "seed: cannot be read"),
    "a list as a key": (HEAD + b"? [a, b]\n: 1\n", "expected texts as keys"),
    "two documents": (HEAD + b"---\n" + HEAD, "expected a single document"),
    "a key twice": (HEAD + b"sparsity: 0.6\n", "sparsity: given twice"),
    "a key twice further in": (
        HEAD + b"select:\n  exclude: a\n  exclude: b\n", "select.exclude: given twice"
    ),
    "empty": (b"", "Input should be a valid dictionary"),
    "no YAML": (b"a: [", "is no valid YAML"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_is_refused_by_name_and_quickly(tmp_path, kind):
    raw, text = FILES[kind]
    path = tmp_path / "hostile recipe.yaml"
    path.write_bytes(raw)
    began = time.monotonic()
    with pytest.raises(ValueError) as error:
        load_recipe(path)
    assert time.monotonic() - began < 10
    assert type(error.value).__name__ in ("ValueError", "RecipeError")
    assert "hostile recipe.yaml" in str(error.value)
    assert text in str(error.value)
    assert len(str(error.value)) < 2000


def test_devices_without_end_are_not_read_to_it():
    with pytest.raises(ValueError, match="/dev/zero has more than"):
        load_recipe("/dev/zero")


def test_good_files_stay_good(tmp_path):
    path = tmp_path / "good.yaml"
    for raw in (
        HEAD,
        b"\xef\xbb\xbf" + HEAD,
        HEAD.replace(b"\n", b"\r\n"),
        HEAD + b"select: &name {exclude: [a, {}]}\n".replace(b"{}", b"'*.b'"),
        HEAD + "# \N{SNOWMAN}\n".encode(),
        HEAD + b"#" * (1_000_000 - len(HEAD)),
    ):
        path.write_bytes(raw)
        assert load_recipe(path).sparsity == 0.5
