"""``python -m distprune selftest``: the contract in miniature, on this machine, backend and torch.

Small models are wrapped in every way that the ranks at hand allow, and each check compares what
distprune does with a reference of its own: numpy and a sort. It needs torch and numpy only, and
says what holds here, what does not, and what could not be tried.

    models      small models, every way to wrap them, and the reference
    comparing   what this rank holds against the reference
    checks      one function for each line of the contract
    ranks       the ranks: how they meet, and how they learn of each other's results
    table       what is printed
    running     one check after the other, with a deadline for each
"""
