"""Which ranks take part in a call, and all communication between them."""
