"""``python -m distprune``: the command line, under torchrun too.

For ``-m``, Python puts the current folder first on the path of modules. It may be a checkpoint that
somebody downloaded, with a ``torch.py`` in it, so it is taken off before anything is imported.
"""

import os  # Python has imported both already
import sys


def _take_current_folder_off_the_path() -> None:
    try:
        current = os.getcwd()
    except OSError:  # it was deleted
        current = ""
    if sys.path and sys.path[0] in ("", current) and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]


if __name__ == "__main__":
    _take_current_folder_off_the_path()
    from distprune.cli import main

    main()
