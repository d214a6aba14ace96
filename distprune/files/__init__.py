"""Prune safetensors checkpoints of any size in bounded memory, on one process or many.

    from distprune.files.planning import plan  # headers only
    from distprune.files.pruning import prune  # streams, ranks, writes
    from distprune.recipes import Recipe
    from distprune.files.verifying import verify

    prune(plan("Llama-3-8B", Recipe(sparsity=0.5)), "Llama-3-8B-sparse")

One module for each command: ``planning``, ``pruning``, ``applying``, ``verifying``, ``inspecting``
(which also compares two checkpoints). They are made of modules and rooms, each of which imports
only those above it::

    text, errors, team               messages; exit codes; the ranks of a run
    disk                             bytes, folders and locks
    recipe, checkpoints              what to do; headers, a folder of safetensors files, its masks
    layouts, selecting               where inputs lie; which tensors are pruned, in which groups
    matching, scoring                statistics of activations and given scores, for these tensors
    planning                         how many elements of each group
    reading                          scores and keys, read from the files when they are needed
    cuts                             where each group's ranking is cut
    rewriting, lowest                the parts of a weight file, and which elements are kept
    reports                          what was done, as JSON and as a model card
    output, results                  the folder that is renamed at the end, and its files

Everything up to the plan reads headers and needs neither torch nor numpy, except that statistics of
activations are read with numpy, and budgets need torch. Nothing is imported here.
"""
