"""The command line: ``distprune`` and ``python -m distprune``.

Click reads the arguments, rich shows progress; the work is done by ``distprune.files``. Modules
here import torch, and whatever imports it, only inside the commands that need it.
"""
