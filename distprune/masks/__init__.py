"""How a mask acts: the only code that changes modules."""
