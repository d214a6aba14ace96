"""The result folder: how it is checked, filled, resumed after a stop, and published."""
