"""Calls that have to fail on every rank, and the errors that torch raises for them."""

import torch

import distprune as prune


def _global(run, name, amount, method=prune.L1Unstructured, scores=None, **bounds):
    pairs = [run.target(name)]
    given = None if scores is None else {pairs[0]: scores}
    prune.global_unstructured(pairs, method, given, amount=amount, **bounds)


def _nan(run, name):
    scores = torch.full(run.oracle.value(name).shape, torch.nan)
    _global(run, name, 1, scores=scores)


def _bias(run, name):
    """Return a bias without a mask: it has no channels. (torch accepts one with a mask.)

    Raises:
        ValueError: every bias has a mask. It is the error that the mistake must raise, too.
    """
    for other in run.indices:
        if run.oracle.value(other).ndim == 1 and not hasattr(*_mask_of(run, other)):
            return run.target(other)
    raise ValueError("every bias is pruned")


def _matrix(run):
    return next(run.target(name) for name in run.indices if run.oracle.value(name).ndim > 1)


def _mask_of(run, name):
    module, parameter = run.target(name)
    return module, parameter + "_mask"


def _single(amount):
    return lambda run, name: prune.l1_unstructured(*run.target(name), amount)


# By name: the error, and the call with a Run and the name of a parameter.
MISTAKES = {
    "global too many": (ValueError, lambda run, name: _global(run, name, 10**6)),
    "global above one": (ValueError, lambda run, name: _global(run, name, 1.5)),
    "global negative": (ValueError, lambda run, name: _global(run, name, -1)),
    "global text": (TypeError, lambda run, name: _global(run, name, "half")),
    "global structured": (
        TypeError,
        lambda run, name: _global(run, name, 0.5, prune.RandomStructured),
    ),
    "global empty": (
        ValueError,
        lambda run, name: prune.global_unstructured([], prune.L1Unstructured, amount=0.5),
    ),
    "global NaN": (ValueError, _nan),
    "global floor above ceiling": (
        ValueError,
        lambda run, name: _global(run, name, 0.5, min_sparsity=1.0, max_sparsity=0.0),
    ),
    "global bound of nothing": (
        ValueError,
        lambda run, name: _global(run, name, 0.5, max_sparsity={"nothing": 0.5}),
    ),
    "single too many": (ValueError, _single(10**6)),
    "single above one": (ValueError, _single(1.5)),
    "single negative": (ValueError, _single(-1)),
    "single text": (TypeError, _single("half")),
    "single no such name": (
        AttributeError,
        lambda run, name: prune.l1_unstructured(run.target(name)[0], "nothing", 0.5),
    ),
    "norm of a bias": (
        ValueError,
        lambda run, name: prune.ln_structured(*_bias(run, name), 1, 2, 0),
    ),
    "no such dimension": (
        IndexError,
        lambda run, name: prune.ln_structured(*_matrix(run), 0.5, 2, 5),
    ),
    "random channels of a bias": (
        ValueError,
        lambda run, name: prune.random_structured(*_bias(run, name), 1, 0),
    ),
    "remove no such name": (
        ValueError,
        lambda run, name: prune.remove(run.target(name)[0], "nothing"),
    ),
}
