"""``python -m distprune selftest``: tests the contract on this machine, backend and torch.

Small models are wrapped in every way that the number of ranks allows, and each check compares
distprune with an independent reference: numpy and a sort. The self-test needs torch and numpy
only, and reports what passed, what failed, and what could not be tried.

    checks      one function for each part of the contract; small models, every way to wrap them,
                and the reference
    running     runs the checks on all ranks, each with a deadline; the text of the report
"""
