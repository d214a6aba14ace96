"""A stand-in for what examples/prune_torchtitan.py uses of torchtitan 0.3.0.

torchtitan itself needs torch 2.15, and packages that the tests do not install. Here are the same
names, types and order of calls on a small model; integrations/test_torchtitan.py compares them with
torchtitan's sources, and runs the example in torchtitan itself, where that can be imported.
"""
