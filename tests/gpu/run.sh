#!/usr/bin/env bash
# What to run where there is a GPU: tests/gpu/run.sh --out FOLDER. See tests/gpu/README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" tests/gpu/run_stages.py "$@"
