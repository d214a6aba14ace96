#!/bin/sh
# Runs prune_tiny_llama.py under torchrun; further arguments go to it.
#   NPROC=4 launch/prune_tiny_llama.sh --wrap tp
# NPROC, PYTHON, and NNODES for several machines: see torchrun.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)

exec sh "$here/torchrun.sh" "$here/prune_tiny_llama.py" "$@"
