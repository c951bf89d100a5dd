#!/bin/sh
# gpu_check.sh [pytest arguments]: the GPU tests of the kernels, a few at a time: compilation takes most of the time, and
# it runs on the CPU's cores.
# gpu_check.sh sanitize: decode attention under compute-sanitizer's memcheck and racecheck.
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="${PYTHONPATH:-.}"
if [ "$1" = sanitize ]; then
    for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --kernel-name kernel_substring=decode_attention --error-exitcode 1 \
            python3 -m tests.pallas_kernels.sanitizer_case || exit 1
    done
    exit
fi
python3 -m pytest -q -m gpu -p no:cacheprovider -p no:benchmark -n "${JOBS:-8}" tests/pallas_kernels "$@"
