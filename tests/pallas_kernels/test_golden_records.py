"""Records of pages never change: those committed here were written by version 0.1 before its modules were regrouped."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import quantize_keys, quantize_values

GOLDEN = Path(__file__).parent / "golden_records.npz"
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# name: (side, format, options of the quantizer)
CASES = {
    "kitty": ("keys", PageFormat(boosted=16), {}),
    "kitty_pro_d64": ("keys", PageFormat(head_dim=64, boosted=16), {}),
    "kivi2": ("keys", PageFormat(boosted=0), {}),
    "k4": ("keys", PageFormat(boosted=128), {}),
    "plus": ("keys", PageFormat(boosted=32), {"score": "range", "shrink": SHRINKS, "weights": True}),
    "large": ("keys", PageFormat(boosted=16), {"factor": 2.0**18}),
    "v2": ("values", PageFormat(), {}),
    "v2_d64": ("values", PageFormat(head_dim=64), {}),
    "v2_shrunk": ("values", PageFormat(), {"shrink": (0.8,)}),
    "v4": ("values", PageFormat(value_bits=4), {}),
    "small_page": ("keys", PageFormat(page=32, head_dim=32, boosted=4), {}),
}


def record(name: str) -> np.ndarray:
    """The record of a page whose numbers are multiples of 1/64, so that every sum over it is exact on any machine."""
    side, fmt, options = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    page = rng.integers(-400, 400, (1, 1, fmt.page, fmt.head_dim)).astype(np.float32) / 64
    page *= rng.integers(1, 9, fmt.head_dim).astype(np.float32)
    options = dict(options)
    page *= options.pop("factor", 1.0)
    if options.pop("weights", False):
        options["weights"] = jnp.asarray(rng.integers(1, 64, (1, 1, fmt.head_dim)).astype(np.float32) / 16)
    quantize = quantize_keys if side == "keys" else quantize_values
    return np.asarray(quantize(jnp.asarray(page), fmt, **options))[0, 0]


@pytest.mark.parametrize("name", CASES)
def test_record_is_the_committed_one(name: str) -> None:
    with np.load(GOLDEN) as golden:
        np.testing.assert_array_equal(record(name), golden[name])
