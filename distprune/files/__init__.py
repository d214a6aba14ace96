"""Prune safetensors checkpoints of any size in bounded memory, on one process or many.

    from distprune.files.planning import plan  # headers only
    from distprune.files.pruning import prune  # streams, ranks, writes
    from distprune.recipes import Recipe
    from distprune.files.verifying import verify

    prune(plan("Llama-3-8B", Recipe(sparsity=0.5)), "Llama-3-8B-sparse")

``pruning`` has the commands prune and apply; ``verifying`` has verify, inspect and diff. Each
module imports only those above it::

    errors                messages; exit codes
    disk                  bytes at offsets, new files, and the folder that is renamed at the end
    checkpoint            headers, a folder of safetensors files
    mask_files            masks beside weights
    selecting             which tensors are pruned, in which groups; where their inputs lie
    statistics_file       statistics of activations and gradients, and which tensors they belong to
    planning              how many elements of each group, and by what they are scored
    team                  the ranks of a run
    ranked                keys, read when they are needed; cuts; which elements are kept
    reports               what was done, as JSON and as a model card

Everything up to the plan reads headers and needs neither torch nor numpy, except that statistics of
activations are read with numpy, and budgets need torch. Nothing is imported here.
"""
