"""Prompts in pieces: some sequences at a time, long prompts over their packed pages, shapes that recur."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.chunk_attention import chunk_attention
from kitty_jax.cache.dense_attention import masked_attention, partial_dense_attention
from kitty_jax.cache.layer_cache import Step
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.cache.steps import functional, prefill
from kitty_jax.inference.decode_loop import jit_start
from kitty_jax.inference.generate import generate, prepare
from kitty_jax.inference.prompt_steps import prompt_steps
from kitty_jax.pallas_kernels.decode_attention.operation import decode_attention
from kitty_jax.pallas_kernels.page_format import BUFFERS
from kitty_jax.pallas_kernels.partials import finish, merge
from tests.cache.kv_cases import append_jit, random_kv, random_q
from tests.inference.generate_cases import VOCAB, small_cache, tiny_model

RAGGED = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((70, 3, 200, 31, 64, 129, 5))]
jit_prefill = jax.jit(prefill, static_argnames=("fresh", "implementation"))


@pytest.mark.parametrize("budget", [64, 256, 1000])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_plan_holds_every_token_once_in_order(budget, groups):
    prompts = [np.array(p, np.int32) for p in RAGGED]
    rows, batch = [1, 6, 3, 0, 2, 7, 4], 8
    got = {row: [] for row in rows}
    ended, shapes = set(), set()
    for piece in prompt_steps(prompts, rows, batch=batch, groups=groups, budget=budget):
        size, width = piece.tokens.shape
        assert size * width <= budget * groups
        assert width & (width - 1) == 0
        assert size % groups == 0
        shapes.add((size, width))
        for some in piece.rows.reshape(groups, -1).tolist():
            real = [x for x in some if x < batch // groups]
            assert len(set(real)) == len(real)
        for i, local in enumerate(piece.rows.tolist()):
            if local >= batch // groups:
                assert (piece.lengths[i], piece.ends[i]) == (0, False)
                continue
            row = local + i // (size // groups) * (batch // groups)
            assert row not in ended
            assert piece.lengths[i]
            assert piece.fresh == (not got[row])
            got[row] += piece.tokens[i, : piece.lengths[i]].tolist()
            if piece.ends[i]:
                ended.add(row)
    assert ended == set(rows)
    assert [got[row] for row in rows] == RAGGED
    assert len(shapes) <= 6


def test_one_step_where_the_budget_allows():
    prompts = [np.array(p, np.int32) for p in RAGGED]
    (only,) = prompt_steps(prompts, list(range(7)), batch=7, budget=7 * 256)
    assert (only.tokens.shape, only.rows, only.fresh, only.ends.all()) == ((7, 256), None, True, True)
    with pytest.raises(ValueError, match="64 tokens or more, got 63"):
        prompt_steps(prompts, list(range(7)), batch=7, budget=63)


def test_some_rows_at_a_time_give_the_state_of_all_at_once():
    """In scrambled order, with a padding row; a sequence that is not among the rows stays as it is."""
    model = functional(tiny_model(num_layers=2))
    tokens = np.zeros((4, 64), np.int32)
    lengths = np.array([33, 64, 7, 50], np.int32)
    for row, n in enumerate(lengths):
        tokens[row, :n] = np.random.default_rng(row).integers(0, VOCAB, n)
    state = init_state([small_cache("kitty_plus"), "full"], model.config, batch=4, capacity=128)
    wanted_logits, wanted = jit_prefill(model, state, tokens, lengths, fresh=True)
    for rows in ([3, 1], [0, 4]):
        index = np.minimum(rows, 3)
        own = np.where(np.array(rows) < 4, lengths[index], 0)
        logits, state = jit_prefill(model, state, tokens[index], own, rows=np.array(rows, np.int32), fresh=True)
        for x, row in zip(logits, rows, strict=True):
            if row < 4:
                np.testing.assert_allclose(x, wanted_logits[row], rtol=1e-5, atol=1e-5)
        if rows == [3, 1]:
            assert state.lengths.tolist() == [0, 64, 0, 50]
    _, state = jit_prefill(model, state, tokens[2:3], lengths[2:3], rows=np.array([2], np.int32), fresh=True)
    assert state.lengths.tolist() == lengths.tolist()
    # Products of two rows and of four may differ in the last bit, and a code at a boundary with them.
    for (path, got), (_, want) in zip(*map(jax.tree_util.tree_leaves_with_path, (state, wanted)), strict=True):
        if got.dtype == jnp.uint32:
            assert np.mean(got != want) < 0.02, path
        else:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=str(path))


def primitives(jaxpr, names: tuple[str, ...]):
    """Equations of those primitives, in inner programs as well."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in names:
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from primitives(inner, names)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_chunk_into_empty_sequences_reads_no_buffer(fresh):
    """XLA copies, for all layers at once, a buffer that is read and written in one program."""
    state = init_state(small_cache("kitty_pro"), tiny_model().config, batch=3, capacity=128)
    layer, rows = state.layers[0], jnp.array([2, 0], jnp.int32)
    _, heads, _, dim = layer.kv.tail_keys.shape
    new, count = jnp.zeros((2, 64, heads, dim), layer.kv.tail_keys.dtype), jnp.array([64, 9], jnp.int32)

    def run(layer):
        none = jnp.zeros(2, jnp.int32)
        step = Step(none, count, state.page_table[:2], "xla", rows=rows, fresh=fresh)
        return layer.append(step, None, new, new)

    buffers = {getattr(layer.kv, name).shape for name in BUFFERS}
    read = [e for e in primitives(jax.make_jaxpr(run)(layer).jaxpr, ("gather",)) if e.invars[0].aval.shape in buffers]
    assert bool(read) == (not fresh)


def test_the_loop_over_a_history_begins_with_no_constant():
    """XLA makes constants of all layers when a program starts."""
    state = init_state(small_cache("kitty_pro"), tiny_model().config, batch=1, capacity=128)
    kv = state.layers[0].kv
    _, heads, _, dim = kv.tail_keys.shape
    q, new = jnp.zeros((1, 64, 2 * heads, dim), kv.tail_keys.dtype), jnp.zeros((1, 64, heads, dim), kv.tail_keys.dtype)

    made = jax.make_jaxpr(chunk_attention)(
        q, new, new, kv, state.page_table, state.lengths, jnp.full(1, 64, jnp.int32)
    ).jaxpr
    (loop,) = [e for e in primitives(made, ("while",)) if any(x.aval.shape == q.shape for x in e.outvars)]
    makers = {x: e.primitive.name for e in made.eqns for x in e.outvars}
    begins = [makers[x] for x in loop.invars if x.aval.shape == q.shape and x in makers]
    assert begins
    assert "broadcast_in_dim" not in begins


def test_later_pieces_of_rows_in_any_order_end_where_each_alone_does():
    """Full pages of old and new tokens, bit for bit, as nothing is computed but the cache."""
    state = init_state(small_cache("kitty_plus"), tiny_model().config, batch=3, capacity=128)
    layer = state.layers[0]
    _, heads, _, dim = layer.kv.tail_keys.shape
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.normal(size=(3, 90, heads, dim)), layer.kv.tail_keys.dtype) for _ in range(2))
    queries = jnp.asarray(rng.normal(size=(3, 90, 2 * heads, dim)), keys.dtype)
    table = jnp.arange(3 * state.page_table.shape[1], dtype=jnp.int32).reshape(3, -1)

    @jax.jit
    def piece(layer, rows, begin, end):
        index = jnp.clip(begin[:, None] + jnp.arange(50), 0, 89)[..., None, None]
        new = (jnp.take_along_axis(x[rows], index, 1) for x in (keys, values))
        q = jnp.take_along_axis(queries[rows], index, 1)
        return layer.append(Step(begin, end - begin, table[rows], "xla", rows), q, *new)

    cuts = ([0, 0, 0], [33, 40, 21], [80, 90, 71])
    results = []
    for orders in ([[2, 0, 1]] * 2, [[0], [1], [2]] * 2):
        out = layer
        for turn, rows in enumerate(orders):
            at = turn * 2 // len(orders)
            begin, end = (jnp.array([cuts[i][row] for row in rows], jnp.int32) for i in (at, at + 1))
            out = piece(out, jnp.array(rows, jnp.int32), begin, end)
        results.append(out)
    assert all(x.any() for x in (results[0].kv.key_pages, results[0].kv.value_pages))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("chunk, dtype", [(1, jnp.bfloat16), (90, jnp.float32)])
def test_history_equals_attention_over_the_packed_pages(dtype, chunk):
    """Around every boundary of S = 4, G = R = 16, with fewer pages than a block and more."""
    lengths = jnp.array([0, 3, 4, 19, 20, 36, 37, 52, 53, 100, 700], jnp.int32)
    b = lengths.shape[0]
    keys, values = random_kv(3, b, 700, 2, 16, dtype=dtype)
    state = init_state(small_cache("kitty_pro"), KVShape(1, 2, 16, dtype), batch=b, capacity=900)
    state = append_jit(state, keys, values, lengths)
    q = random_q(4, b, chunk, 4, 16, dtype=dtype)
    new_keys, new_values = random_kv(5, b, chunk, 2, 16, dtype=dtype)
    facts = (state.layers[0].kv, state.page_table, lengths, jnp.full(b, chunk, jnp.int32))
    wanted = jax.jit(functools.partial(decode_attention, implementation="xla"))(q, new_keys, new_values, *facts)
    got = jax.jit(chunk_attention)(q, new_keys, new_values, *facts)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=tolerance, rtol=tolerance)
    assert got.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_history_by_cudnn_and_kernels_equals_the_reference(head_dim):
    """Real page size, several blocks of pages, no history, one inside the sink, values that are not yet packed."""
    lengths = jnp.array([0, 7, 32, 170, 300, 5000], jnp.int32)
    b = lengths.shape[0]
    keys, values = random_kv(3, b, 5000, 2, head_dim, dtype=jnp.bfloat16)
    state = init_state("kitty_pro", KVShape(1, 2, head_dim), batch=b, capacity=6000)
    state = append_jit(state, keys, values, lengths)
    q = random_q(4, b, 200, 8, head_dim, dtype=jnp.bfloat16)
    new_keys, new_values = random_kv(5, b, 200, 2, head_dim, dtype=jnp.bfloat16)
    facts = (state.layers[0].kv, state.page_table, lengths, jnp.full(b, 200, jnp.int32))
    wanted = jax.jit(functools.partial(decode_attention, implementation="xla"))(q, new_keys, new_values, *facts)
    got = jax.jit(chunk_attention)(q, new_keys, new_values, *facts)
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=3e-2, rtol=3e-2)


def test_partial_dense_attention_merges_to_full_attention():
    q, (k, v) = random_q(1, 2, 24, 4, 16), random_kv(2, 2, 24, 2, 16)
    old_k, old_v = random_kv(3, 2, 40, 2, 16)
    visible = jnp.array([17, 0], jnp.int32)
    got = finish(merge(partial_dense_attention(q, k, v, None), partial_dense_attention(q, old_k, old_v, visible)))
    for b, n in enumerate(visible.tolist()):
        joined = [
            jnp.concatenate([old[b : b + 1, :n], new[b : b + 1]], axis=1) for old, new in ((old_k, k), (old_v, v))
        ]
        wanted = masked_attention(q[b : b + 1], *joined, jnp.array([n], jnp.int32))
        np.testing.assert_allclose(got[b : b + 1], wanted, atol=1e-5, rtol=1e-5)


def test_generate_with_a_small_budget_gives_the_same_tokens():
    """Full precision: pieces change nothing but the order of sums. Prompts longer than the budget included."""
    options = {"cache": "full", "max_new_tokens": 12}
    whole = generate(tiny_model(), RAGGED, **options)
    assert len(prepare(tiny_model(), RAGGED, **options, prefill_tokens=128).steps) > 3
    assert generate(tiny_model(), RAGGED, **options, prefill_tokens=128).sequences() == whole.sequences()


def test_what_is_cut_does_not_depend_on_the_batch():
    """With a budget of 192 a prompt of 180 tokens is cut at 128, alone and beside others."""
    options = {"cache": small_cache("kitty_pro"), "max_new_tokens": 30, "capacity": 256, "prefill_tokens": 192}
    long = RAGGED[2][:180]
    alone, beside = (prepare(tiny_model(), p, **options) for p in ([long], [long, RAGGED[0]]))
    assert [x.lengths.tolist() for x in alone.steps] == [[128], [52]]
    assert [x.lengths.tolist() for x in beside.steps[:2]] == [[128], [52]]
    assert beside.run().sequences()[0] == alone.run().sequences()[0]


def test_other_prompts_compile_no_new_steps():
    options = {"cache": "full", "max_new_tokens": 4, "capacity": 256, "prefill_tokens": 256}
    rng = np.random.default_rng(0)

    def prompts(longest):
        return [rng.integers(0, VOCAB, n).tolist() for n in (longest, *rng.integers(1, 60, 7))]

    generate(tiny_model(), prompts(100), **options)
    size = jit_start._cache_size()
    for longest in (70, 120, 97):
        generate(tiny_model(), prompts(longest), **options)
    assert jit_start._cache_size() == size
