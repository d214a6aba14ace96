"""One module for each command of ``distprune``, by its name."""
