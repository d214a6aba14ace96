"""Formats of single files: safetensors headers, pickles, JSON and YAML."""
