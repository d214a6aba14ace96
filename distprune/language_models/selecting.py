"""Which parameters of a language model are pruned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from distprune._common.naming import NamedParameter, full_name, named_modules, unwrap
from distprune._common.pruned_form import name_of_pruned_orig
from distprune.api.select import select
from distprune.files.selecting.default_selection import reason_to_keep
from distprune.language_models.layers import head_of
from distprune.torch_private.wrapper import managed_parameters


def select_matrices(
    model: nn.Module, include: str | Sequence[str] | None = None, exclude: str | Sequence[str] = ()
) -> list[NamedParameter]:
    """The parameters that ``distprune prune`` selects in the files of the same model.

    By default these are all matrices but embeddings, heads, norms, routers, biases, and what else
    is no layer's weight; experts in one parameter of three dimensions are among them.

    Args:
        model: of transformers, plain or wrapped.
        include: patterns, as ``select`` takes them; matrices that match one are taken instead.
        exclude: patterns of those that are left out.

    Returns:
        As ``select``: (module, name) pairs with full names, in the order of the model.

    Raises:
        ValueError: a pattern that matches no matrix; nothing is left.

    Cost: a walk over the modules; no communication.
    """
    matrices = _matrices_of(model)
    own_names = sorted({name for _, name in matrices})
    selected = select(model, include=include, exclude=exclude, names=own_names)
    head = head_of(model)

    def is_taken(parameter: NamedParameter) -> bool:
        found = [matrices.get((id(module), name)) for module, name in parameter.places]
        if None in found:
            return False
        is_looked_up = any(
            isinstance(module, nn.Embedding) or module is head for module, _ in parameter.places
        )
        return include is not None or not (
            is_looked_up or any(reason_to_keep(*matrix) for matrix in found if matrix)
        )

    taken = [parameter for parameter in selected if is_taken(parameter)]
    if not taken:
        raise ValueError(
            f"nothing is selected in this {type(unwrap(model)).__name__}: none of the "
            f"{len(selected)} parameters that include={include!r} and exclude={exclude!r} leave is "
            "a matrix inside the model. Expected patterns for others."
        )
    return taken


def _matrices_of(model: nn.Module) -> dict[tuple[int, str], tuple[str, torch.Size]]:
    """Parameters with two or more dimensions that are larger than 1.

    Returns:
        By id of the module and name of the parameter there: its full name, and its whole shape.
    """
    managed: dict[int, dict[str, torch.Size]] = {}
    for (owner, name), record in managed_parameters(model).items():
        managed.setdefault(owner, {})[name] = torch.Size(record.shape)
    found = {}
    for path, module in named_modules(model):
        shapes = {name: p.shape for name, p in module._parameters.items() if p is not None}
        for registered, shape in (shapes | managed.get(id(module), {})).items():
            name = name_of_pruned_orig(registered, module._buffers) or registered
            if sum(size > 1 for size in shape) >= 2:
                found[id(module), name] = full_name(path, name), shape
    return found
