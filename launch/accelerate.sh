#!/bin/sh
# Runs a Python program under `accelerate launch`; further arguments go to the program.
#   NPROC=8 CONFIG=fsdp2 launch/accelerate.sh train.py --lr 1e-3
# CONFIG  a file of configs/accelerate, without .yaml (default ddp)
# NPROC   processes on this machine (default 2)
# CPU     1: real processes over gloo, for trying things out. Accelerate has no FSDP there
# PYTHON  the interpreter (default python)
#
# Accelerate falls back in silence: `accelerate launch --cpu --num_processes 2` starts one
# process, and FSDP on a CPU becomes DDP. Programs find out by distprune's check_wrapping,
# to which NPROC says how many processes were asked for.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")

export NPROC="${NPROC:-2}"
# Several ranks share this machine's cores: more threads each would only get in the way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# distprune also runs from a checkout that nobody has installed.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ "${CPU:-0}" = 1 ]; then
    # Not --cpu, which means one process. The configs ask for several, on GPUs; this moves them.
    export ACCELERATE_USE_CPU=true
fi

# Port 0: any that is free.
exec "${PYTHON:-python}" -m accelerate.commands.launch \
    --config_file "$root/configs/accelerate/${CONFIG:-ddp}.yaml" \
    --num_processes "$NPROC" --main_process_port 0 "$@"
