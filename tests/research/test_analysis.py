"""The sensitivity of channels, by the definition: quantize one channel, compute all logits, compare."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.research.analysis import channel_sensitivity
from kitty_jax.research.fake_quantize import fake_quantize_keys

CONFIG = CacheConfig.kivi2_sink(sink=3, page=16, window=16)


def test_sensitivity_by_definition():
    q, k = (jax.random.normal(jax.random.key(i), (40, heads, 16), jnp.float32) for i, heads in ((0, 4), (1, 2)))
    got = channel_sensitivity(q, k, CONFIG)
    quantized = fake_quantize_keys(k[None], CONFIG)[0]
    for head, channel in ((0, 3), (3, 15)):
        changed = k.at[:, :, channel].set(quantized[:, :, channel])
        errors = []
        for t in range(40):
            for s in range(3, t):
                if (s - 3) // 16 < (t - 3) // 16:
                    errors.append(float(q[t, head] @ (changed[s, head // 2] - k[s, head // 2])) / 4)
        assert got[head, channel] == pytest.approx(np.mean(np.square(errors)), rel=1e-4)


def test_a_text_without_a_page_is_refused():
    q, k = jnp.zeros((19, 4, 16)), jnp.zeros((19, 2, 16))
    with pytest.raises(ValueError, match="19 tokens are too few"):
        channel_sensitivity(q, k, CONFIG)
