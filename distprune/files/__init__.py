"""Prune safetensors checkpoints of any size in bounded memory, on one process or many.

    from distprune.files.planning import plan  # headers only
    from distprune.files.pruning import prune  # streams, selects, writes
    from distprune.files.recipe import FileRecipe
    from distprune.files.verifying import verify

    prune(plan("Llama-3-8B", FileRecipe(sparsity=0.5)), "Llama-3-8B-sparse")

A pickled checkpoint becomes safetensors first: ``distprune.files.pickled.Conversion``.

What flows: header -> checkpoint -> policy -> grouping -> planning -> units -> deciding -> pruning.
Everything up to the plan reads headers and needs neither torch nor numpy. Nothing is imported here.
"""
