"""Files and folders: access at offsets, listings and locks; no formats."""
