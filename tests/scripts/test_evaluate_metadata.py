"""`scripts/evaluate.py metadata`: float16 metadata against the package's own simulation, bits, encodings, errors."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.models.checkpoint import load_model
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.research.metrics import evaluate_text
from scripts.eval_metadata import Encoding, quantized, to_e4m3, to_grid
from scripts.eval_text import read_tokens
from scripts.evaluate import main
from tests.scripts.cli_checkpoint import write_checkpoint

TEXT = "the cat sat on 123 mats, and the other cat did not. " * 8
CACHES = ("kitty:sink=4,page=16,window=16", "kitty-plus:sink=4,page=16,window=16")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metadata")
    (folder / "text.txt").write_text(TEXT)
    return write_checkpoint(folder), folder / "text.txt", folder / "out.json"


def arguments(files, *more):
    model, text, out = files
    return [str(x) for x in ("metadata", "--model", model, "--file", text, "--json", out, "--tokens", 120, *more)]


def test_float16_is_the_package_and_eight_bits_cost_little(files):
    more = ["--start", "40"] + [word for name in CACHES for word in ("--cache", name)]
    for encoding in ("f16,16,16,2", "lin,8,8,2"):
        more += ["--encoding", encoding]
    assert main(arguments(files, *more)) == 0
    rows = {(row["cache"], row["kind"], row["min_bits"]): row for row in json.loads(files[2].read_text())}
    tokens = read_tokens(files[0], files[1], 120)
    wanted = evaluate_text(load_model(files[0]), tokens, {n: cache_from_spec(n) for n in CACHES}, start=40)
    for name in CACHES:
        own, eight = rows[name, "f16", 16], rows[name, "lin", 8]
        assert own["attn_rel_err"] == pytest.approx(wanted[name]["attn_rel_err"][0], rel=5e-3)
        assert own["kl"] == pytest.approx(wanted[name]["kl"], rel=5e-2)
        assert eight["attn_rel_err"] == pytest.approx(own["attn_rel_err"], rel=0.1)
        assert 0 < abs(eight["attn_rel_err"] - own["attn_rel_err"])


@pytest.mark.parametrize("head_dim,boosted", [(64, 8), (64, 16), (128, 16), (128, 32)])
def test_float16_takes_the_bits_of_the_page_format(head_dim, boosted):
    fmt = PageFormat(head_dim=head_dim, boosted=boosted)
    assert Encoding("f16", 16, 16, boosted).bits(head_dim) == fmt.bits_per_element


def test_bits_of_eight_bit_metadata_by_hand():
    # Keys: 64 + 8 planes of 2 bits, 16 bits a channel, 64 for the ends of the steps, 8 a boosted channel, 8; then a
    # multiple of 128. Values: 16 bits a token.
    key, value = 2 * 128 * 72 + 16 * 64 + 64 + 64 + 8, 2 * 128 * 64 + 16 * 128 + 64 + 8
    whole = (-(-key // 128) + -(-value // 128)) * 128
    assert Encoding.parse("lin,8,8,8").bits(64) == whole / (2 * 128 * 64)


def test_the_grid_holds_its_ends_and_no_more_than_its_steps():
    x = jnp.linspace(-1, 3, 1001)
    got = to_grid(x, jnp.float32(-1), jnp.float32(3), jnp.float32(3))
    assert len(np.unique(np.round(got, 5))) == 8
    assert (got[0], got[-1]) == (-1, 3)
    assert np.max(np.abs(got - x)) <= 4 / 7 / 2 + 1e-6


def test_e4m3_is_float8():
    x = np.random.default_rng(0).standard_normal((1, 16, 16)).astype(np.float32)
    x[0, 0, 0] = 4  # the page's greatest, 2**2: shifted to 2**8, so all is float8 times 2**-6
    x = np.clip(x, -4, 4)
    wanted = (x * 64).astype(jnp.float8_e4m3fn).astype(np.float32) / 64
    np.testing.assert_array_equal(np.asarray(to_e4m3(jnp.asarray(x))), wanted)


def test_fewer_bits_cost_more_where_channels_differ():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 32, 16)) * np.exp(rng.standard_normal(16)) + 4 * rng.standard_normal(16)

    def error(kind, bits):
        numbers = tuple(jnp.float32(n) for n in (kind, bits, bits))
        pages = jnp.asarray(x, jnp.float32)
        return float(jnp.mean(jnp.square(quantized(pages, -2, 15.0, (1.0,), numbers) - pages)))

    own = error(0, 16)
    for kind in (1, 2):
        assert error(kind, 8) == pytest.approx(own, rel=0.05)
        assert own < error(kind, 4) < error(kind, 2)


@pytest.mark.parametrize("kind", range(4))
def test_a_page_of_one_number_comes_back(kind):
    x = jnp.full((1, 16, 16), 2.5)
    for axis in (-2, -1):
        got = quantized(x, axis, 3.0, (1.0, 0.8), tuple(jnp.float32(n) for n in (kind, 6, 6)))
        np.testing.assert_allclose(got, x, rtol=1e-5)


@pytest.mark.parametrize(
    "change,message",
    [
        (["--encoding", "log,4,6"], "an encoding is KIND,SCALE BITS,MIN BITS,BOOSTED"),
        (["--encoding", "f16,8,8,8"], "write f16,16,16,8"),
        (["--encoding", "lin,0,8,8"], "a bit or more"),
        (["--cache", "full"], "wanted one quantized cache"),
        (["--cache", "k2v4"], "2-bit values"),
        (["--cache", "kitty:selection=random"], "'random' is not simulated here"),
        (["--cache", "kitty:metadata=fixed8"], "the encodings say how scale and min are stored; leave out fixed8"),
    ],
)
def test_errors_are_one_line(files, capsys, change, message):
    assert main(arguments(files, "--start", "40", *change)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
