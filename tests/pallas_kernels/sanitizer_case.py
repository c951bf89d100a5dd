"""Runs decode attention on three small cases, for compute-sanitizer (scripts/gpu_check.sh sanitize).

The data is made on the CPU: under the sanitizer, compiling programs for the GPU takes minutes, and only the kernels
matter here.
"""

import jax

from tests.pallas_kernels.test_decode_attention_mgpu import Case

for splits in (1, 2, 3):  # one block; a cluster of two; three blocks and a second kernel
    case = Case((700, 33), splits=splits, kv_heads=1, pages=6)
    with jax.default_device(jax.devices("cpu")[0]):
        arguments = case.random()
    out = jax.jit(case.kernel)(*jax.device_put(arguments, jax.devices("gpu")[0]))
    print(f"splits={splits}: out[0, 0, 0, :2] = {jax.device_get(out)[0, 0, 0, :2]}", flush=True)
