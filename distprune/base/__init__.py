"""Numbers, names and communication: used by all other rooms, and using none of them."""
