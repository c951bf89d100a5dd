"""The page format: sizes and offsets of the parts, joining and splitting records, counts that follow from a length."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels.page_format import LayerKV, PageFormat, buffer_slots, join_record, split_record

FORMATS = [
    PageFormat(),
    PageFormat(boosted=32),
    PageFormat(boosted=0),
    PageFormat(boosted=128, value_bits=4),
    PageFormat(head_dim=64, boosted=7),
    PageFormat(page=16, head_dim=16, boosted=3),
    PageFormat(page=48, head_dim=80, boosted=33, value_bits=4),
    PageFormat(page=64, head_dim=256, boosted=255),
]


@pytest.mark.parametrize(
    "boosted,key_bytes,bits",
    [
        (0, 4096 + 512 + 16, None),
        (16, 4096 + 512 + 512 + 16 + 16, 2.38671875),  # Kitty; the paper's form of the channel list would make it 2.41
        (32, 4096 + 1024 + 512 + 32 + 16, 2.515625),  # Kitty-Pro; 2.53
        (128, 4096 + 4096 + 512 + 128 + 16, None),
    ],
)
def test_record_sizes(boosted, key_bytes, bits):
    fmt = PageFormat(boosted=boosted)
    assert 4 * fmt.key_words == key_bytes
    assert 4 * fmt.value_words == 4096 + 512 + 16
    assert 4 * dataclasses.replace(fmt, value_bits=4).value_words == 8192 + 512 + 16
    if bits:
        assert fmt.bits_per_element == bits
    assert fmt.key_bits == key_bytes * 8 / 128**2


def test_offsets():
    fmt = PageFormat(boosted=20)
    assert {name: (p.offset, p.size) for name, p in fmt.key_parts.items()} == {
        "low": (0, 4096),
        "high": (4096, 768),
        "scale": (4864, 256),
        "min": (5120, 256),
        "channels": (5376, 20),
        "exponent": (5396, 1),
    }
    assert {name: (p.offset, p.size) for name, p in fmt.value_parts.items()} == {
        "low": (0, 4096),
        "high": (4096, 0),
        "scale": (4096, 256),
        "min": (4352, 256),
        "exponent": (4608, 1),
    }


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_records_hold_their_parts_one_after_another_and_split_is_the_inverse_of_join(fmt):
    rng, batch = np.random.default_rng(0), (2, 3)
    for layout, words in ((fmt.key_parts, fmt.key_words), (fmt.value_parts, fmt.value_words)):
        parts = {
            name: jnp.asarray(rng.integers(0, 256, (*batch, p.size), np.uint8).view(p.dtype).reshape(*batch, p.count))
            for name, p in layout.items()
        }
        record = join_record(parts, layout)
        assert record.shape == (*batch, words)
        assert record.dtype == jnp.uint32
        back = split_record(record, layout)
        assert list(back) == list(layout)
        raw, end = np.asarray(record).view(np.uint8), 0
        for name, part in layout.items():
            assert (part.offset, part.size) == (end, part.count * part.dtype.itemsize)
            end += part.size
            assert back[name].dtype == part.dtype
            # By bytes: a random float16 may be a NaN.
            assert np.asarray(back[name]).tobytes() == np.asarray(parts[name]).tobytes()
            assert raw[..., part.offset : part.offset + part.size].tobytes() == np.asarray(parts[name]).tobytes()
        assert not raw[..., end:].any()
        assert words % 4 == 0
        assert words * 4 - 16 < end <= words * 4


def test_join_names_the_part_that_does_not_fit():
    fmt = PageFormat(page=16, head_dim=16, boosted=0)
    parts = split_record(jnp.zeros(fmt.value_words, jnp.uint32), fmt.value_parts)
    with pytest.raises(ValueError, match=r"part scale: wanted float16\[16\], got float16\(15,\)"):
        join_record(parts | {"scale": parts["scale"][:15]}, fmt.value_parts)
    with pytest.raises(ValueError, match="part min: wanted float16"):
        join_record(parts | {"min": parts["min"].astype(jnp.bfloat16)}, fmt.value_parts)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"page": 0}, "page must be a positive multiple of 16 tokens, got 0"),
        ({"page": 24}, "page must be a positive multiple of 16 tokens, got 24"),
        ({"head_dim": 72}, "head_dim must be a multiple of 16 from 16 to 256, got 72"),
        ({"head_dim": 272}, "head_dim must be"),
        ({"boosted": -1}, "boosted must be from 0 to head_dim = 128 channels, got -1"),
        ({"boosted": 129}, "got 129"),
        ({"value_bits": 3}, "value_bits must be 2 or 4, got 3"),
    ],
)
def test_formats_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PageFormat(**change)


def _layer(sink=4, window=32, boosted=2):
    fmt = PageFormat(page=16, head_dim=16, boosted=boosted)
    zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)  # noqa: E731
    return LayerKV(
        key_pages=jnp.zeros((5, 2, fmt.key_words), jnp.uint32),
        value_pages=jnp.zeros((5, 2, fmt.value_words), jnp.uint32),
        sink_keys=zeros(3, 2, sink, 16),
        sink_values=zeros(3, 2, sink, 16),
        tail_keys=zeros(3, 2, fmt.page, 16),
        ring_values=zeros(3, 2, window + fmt.page, 16),
        fmt=fmt,
    )


def test_counts_follow_from_the_length_token_by_token():
    """Against the rule played out: a key page whenever G keys wait, a value page whenever R + G values do."""
    kv = _layer()
    assert (kv.sink, kv.window) == (4, 32)
    tokens = keys = values = 0
    want = []
    for length in range(150):
        if length > 4:
            tokens += 1
            keys += tokens - keys * 16 == 16
            values += tokens - values * 16 == 32 + 16
        want.append((tokens, keys, values))
    got = kv.counts(jnp.arange(150, dtype=jnp.int32))
    np.testing.assert_array_equal(np.stack(got, -1), want)


def test_a_layer_is_a_pytree_with_a_static_format():
    kv = _layer()
    assert len(jax.tree.leaves(kv)) == 6
    again = jax.jit(lambda kv: kv)(kv)
    assert again.fmt == kv.fmt
    assert jax.tree.structure(kv) != jax.tree.structure(_layer(boosted=3))


def test_slots_of_the_buffers():
    tokens = np.arange(400)
    tail, ring = buffer_slots(tokens, 128, 300)
    assert [tail[128], tail[300], ring[299], ring[300], ring[399]] == [0, 44, 299, 0, 99]
