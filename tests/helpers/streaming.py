"""What tests of pruning by text share: windows, results, and a run that is killed."""

import filecmp

import torch

from distprune import language_models
from distprune.language_models import TokenWindows


def tokens(num_windows, seed, vocabulary=40, length=12):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(3, vocabulary, (num_windows, length), generator=generator)
    text_of = torch.zeros(num_windows, dtype=torch.int64)
    return TokenWindows(("text",), drawn, text_of, has_bos=False)


def weights_of(folder):
    model = language_models.load_sharded(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def other_files(one, other):
    """Files of two folders that differ."""
    names, of_other = (
        sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        for folder in (one, other)
    )
    assert names == of_other
    return [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]


class Killed(BaseException):
    """Not an error that anything catches."""


def killed_after(num_writes, monkeypatch, run):
    """Run until so many writes of progress are done; returns whether it ended before that."""
    from distprune.files import disk

    writes, write = [], disk.write_atomically

    def killed(path, data):
        writes.extend({"facts.json", "progress.json"} & {str(path).rpartition("/")[2]})
        if len(writes) > num_writes:
            raise Killed
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_atomically", killed)
        try:
            run()
        except Killed:
            return False
    return True
