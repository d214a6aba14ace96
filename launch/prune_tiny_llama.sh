#!/bin/sh
# Runs prune_tiny_llama.py under torchrun; further arguments go to it.
#   NPROC=4 launch/prune_tiny_llama.sh --wrap tp
# NPROC  processes on this machine (default 2)
# PYTHON the interpreter (default python)
set -eu
here=$(cd "$(dirname "$0")" && pwd)

# Several ranks share this machine's cores: more threads each would only get in the way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# distprune also runs from a checkout that nobody has installed.
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-2}" \
    "$here/prune_tiny_llama.py" "$@"
