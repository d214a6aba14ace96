"""Files and folders: access at offsets, listings, locks and journals; no formats."""
