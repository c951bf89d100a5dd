"""Runs decode attention on four small cases, for compute-sanitizer (scripts/gpu_check.sh sanitize).

The data is made on the CPU: under the sanitizer, compiling programs for the GPU takes minutes, and only the kernels
matter here.
"""

import jax

from tests.pallas_kernels.test_decode_attention_mgpu import Case

# One block, with either kind of metadata; a cluster of two; three blocks and a second kernel.
for splits, metadata in ((1, "float16"), (1, "fixed8"), (2, "float16"), (3, "float16")):
    case = Case((700, 33), splits=splits, kv_heads=1, pages=6, metadata=metadata)
    with jax.default_device(jax.devices("cpu")[0]):
        arguments = case.random()
    out = jax.jit(case.kernel)(*jax.device_put(arguments, jax.devices("gpu")[0]))
    print(f"splits={splits}, {metadata}: out[0, 0, 0, :2] = {jax.device_get(out)[0, 0, 0, :2]}", flush=True)
