"""The checks of ``verify``: files, reports, counts, and the order of the cut."""
