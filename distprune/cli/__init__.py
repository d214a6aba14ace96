"""The command line: ``distprune`` and ``python -m distprune``.

Typer reads the arguments, rich writes tables; the work is done by ``distprune.files``. Modules
here import torch, and whatever imports it, only inside the commands that need it.
"""
