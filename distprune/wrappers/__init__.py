"""Private fields of torch: one adapter per wrapper, and the table of all of them."""
