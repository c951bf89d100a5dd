#!/bin/sh
# The GPU tests of the kernels, a few at a time: compilation takes most of the time, and it runs on the CPU's cores.
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="${PYTHONPATH:-.}"
python3 -m pytest -q -m gpu -p no:cacheprovider -p no:benchmark -n "${JOBS:-8}" tests/pallas_kernels "$@"
