"""Modules on which torch.nn.utils.prune fails."""

from __future__ import annotations

import copy

import torch
from pruned_models import pruned_encoder_layer, pruned_lstm, sparse_values_stay_zero, train
from torch import nn

import distprune as prune


class TestModulesThatTorchBreaks:
    def test_attention_with_a_pruned_output_trains(self):
        torch.manual_seed(0)
        pruned = nn.MultiheadAttention(8, 2)
        reference = copy.deepcopy(pruned)
        prune.l1_unstructured(pruned.out_proj, "weight", 0.5)
        keep = pruned.out_proj.weight_mask.clone()
        assert int(keep.sum()) == 32
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (pruned, reference)]
        x = torch.randn(5, 3, 8)
        outputs = []
        for _ in range(5):
            weight = reference.out_proj.weight
            changed = {"out_proj.weight": weight * keep}
            expected = torch.func.functional_call(reference, changed, (x, x, x))[0]
            output = pruned(x, x, x)[0]
            assert torch.equal(output, expected)
            outputs.append(output.detach())
            for each, optimizer in zip((output, expected), optimizers, strict=True):
                optimizer.zero_grad()
                each.square().sum().backward()
                optimizer.step()
        assert not torch.equal(outputs[0], outputs[-1])
        assert torch.equal(pruned.out_proj.weight, reference.out_proj.weight * keep)
        prune.remove(pruned.out_proj, "weight")
        assert type(pruned.out_proj) is type(reference.out_proj)
        assert torch.equal(pruned.out_proj.weight, reference.out_proj.weight * keep)

    def test_an_encoder_layer_trains_and_evaluates(self):
        model, x = pruned_encoder_layer()
        train(model, x, steps=5)
        sparse_values_stay_zero(model)
        training_output = model(x)
        with torch.no_grad():
            evaluated = model.eval()(x)  # the fast path reads the weights itself
        assert torch.allclose(evaluated, training_output, atol=1e-5)
        model.train()
        for module, name in (
            (model.self_attn.out_proj, "weight"),
            (model.self_attn, "in_proj_weight"),
            (model.linear1, "weight"),
        ):
            prune.remove(module, name)
        assert torch.equal(model(x), training_output)

    def test_the_flat_weights_of_an_lstm_follow(self):
        model, x = pruned_lstm()
        for _ in range(3):
            train(model, x)
            model(x)
            for name, weight in zip(model._flat_weights_names, model._flat_weights, strict=True):
                assert weight is getattr(model, name)
            assert torch.equal(
                model.weight_hh_l0, model.weight_hh_l0_orig * model.weight_hh_l0_mask
            )
        prune.remove(model, "weight_hh_l0")
        prune.remove(model, "weight_ih_l0")
        assert all(isinstance(weight, nn.Parameter) for weight in model._flat_weights)
        assert [id(w) for w in model._flat_weights] == [id(p) for p in model.parameters()]
