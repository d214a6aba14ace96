"""The version of distprune, in a module of its own that imports nothing."""

__version__ = "0.2.0"
