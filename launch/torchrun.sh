#!/bin/sh
# Runs a Python program under torchrun; further arguments go to the program.
#   NPROC=8 launch/torchrun.sh train.py --lr 1e-3
# On several machines, the same line on each of them; they meet at one of them:
#   NNODES=2 RDZV_ENDPOINT=host1:29400 NPROC=8 launch/torchrun.sh train.py --lr 1e-3
# NPROC          processes on this machine (default 2)
# NNODES         machines (default 1)
# RDZV_ENDPOINT  host:port of one machine, the same on all; needed if NNODES is not 1
# RDZV_ID        name of the run, the same on all machines (default distprune)
# LOCAL_ADDR     this machine's address, if the others cannot find it by its name
# PYTHON         the interpreter (default python)
set -eu
here=$(cd "$(dirname "$0")" && pwd)

# Several ranks share this machine's cores: more threads each would only get in the way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# distprune also runs from a checkout that nobody has installed.
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"

nnodes="${NNODES:-1}"
if [ "$nnodes" = 1 ]; then
    exec "${PYTHON:-python}" -m torch.distributed.run --standalone \
        --nproc-per-node "${NPROC:-2}" "$@"
fi
if [ -z "${RDZV_ENDPOINT:-}" ]; then
    echo "$0: NNODES=$nnodes, but RDZV_ENDPOINT is not set; expected the host:port" \
        "of one of the machines, the same on all of them." >&2
    exit 2
fi
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$nnodes" \
    --nproc-per-node "${NPROC:-2}" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" \
    --rdzv-id "${RDZV_ID:-distprune}" ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} "$@"
