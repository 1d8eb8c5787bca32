"""Caches: sizes and dtypes, what may be asked of them, and every error."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from glm5fn import (
    Config,
    ContractError,
    IndexCache,
    KDACache,
    MLACache,
    ModelCache,
    cache_nbytes,
    capacity,
    decode_step,
    describe,
    fork,
    forward,
    generate,
    init_cache,
    prefill,
    select,
)
from glm5fn.cache import ring_size
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import model as inputs

CFG = inputs.config("KM")


def numbered(batch=3, **options):
    """A cache whose every row holds its own number."""
    row = torch.arange(batch)
    fill = lambda x: row.view(-1, *[1] * (x.dim() - 1)).expand(x.shape).to(x.dtype).clone()  # noqa: E731
    return pytree.tree_map(fill, init_cache(CFG, batch, 10, **options))


# ----------------------------------------------------------------------------------------------------------- init_cache


@pytest.mark.parametrize("num_spec", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shapes_and_dtypes(dtype, num_spec):
    cache = init_cache(CFG, 3, 10, num_spec=num_spec, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slots = (num_spec + 1,) if num_spec else ()
    wanted = ModelCache(
        layers=(
            KDACache(conv=((3, 3 + num_spec, 48), dtype), state=((3, *slots, 2, 8, 8), wide)),
            MLACache(
                latent=((3, 10, 10), dtype),
                index=IndexCache(pooled=((3, 3, 4), dtype), tail=((3, 2, 4 if num_spec == 0 else 8, 4), dtype)),
            ),
        ),
        length=((3,), torch.int32),
    )
    assert pytree.tree_map(lambda x: (tuple(x.shape), x.dtype), cache) == wanted
    assert not any(x.any() for x in pytree.tree_leaves(cache))
    assert len({x.data_ptr() for x in pytree.tree_leaves(cache)}) == 6, "leaves share memory"


def test_default_dtype_is_bfloat16():
    assert init_cache(CFG, 1, 4).layers[1].latent.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kpool", "spec", "size"),
    [(4, 0, 4), (4, 1, 8), (4, 4, 8), (4, 5, 16), (4, 12, 16), (4, 13, 32), (16, 0, 16), (16, 1, 32), (16, 16, 32),
     (16, 17, 64), (1, 0, 1), (1, 1, 2), (1, 2, 4), (5, 0, 5), (5, 3, 10)],
)  # fmt: skip
def test_ring_size(kpool, spec, size):
    assert ring_size(kpool, spec) == size
    assert size >= kpool + spec


def test_released_sizes():
    """34 KDA layers of constant size, 11 MLA layers whose 1 KiB per token is all that grows."""
    cfg = Config(index_kpool=4)
    one, two = (init_cache(cfg, 1, n, device="meta") for n in (4096, 8192))
    kda, mla = one.layers[0], one.layers[3]
    assert (tuple(kda.conv.shape), tuple(kda.state.shape)) == ((1, 3, 24576), (1, 64, 128, 128))
    assert (tuple(mla.latent.shape), tuple(mla.index.tail.shape)) == ((1, 4096, 512), (1, 2, 4, 128))
    assert [type(layer) for layer in one.layers].count(KDACache) == 34
    assert cache_nbytes(two) - cache_nbytes(one) == 11 * 4096 * (512 * 2 + 128 * 2 // 4)


def test_capacity():
    assert capacity(init_cache(CFG, 1, 10)) == 10
    assert capacity(init_cache(inputs.config("KK"), 1, 10)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": -1}, "init_cache: batch must be at least 0, got -1."),
        ({"capacity": -2}, "init_cache: capacity must be at least 0, got -2."),
        ({"num_spec": -3}, "init_cache: num_spec must be at least 0, got -3."),
        (
            {"capacity": 4097},
            "init_cache: capacity must be at most the model's max_position_embeddings 4096, got 4097.",
        ),
    ],
)
def test_bad_sizes(options, message):
    with pytest.raises(ContractError) as error:
        init_cache(CFG, **{"batch": 1, "capacity": 4} | options)
    assert str(error.value) == message


FLOATS = "bfloat16, float16, float32, float64"


@pytest.mark.parametrize("name", ["batch", "capacity", "num_spec"])
@pytest.mark.parametrize("value", [1.5, 2.0, True, "1", None, [1], torch.tensor(1)], ids=repr)
def test_sizes_that_are_no_whole_numbers(name, value):
    with pytest.raises(ContractError) as error:
        init_cache(CFG, **{"batch": 1, "capacity": 4} | {name: value})
    assert str(error.value) == f"init_cache: {name} must be a whole number, got {value!r}."


def test_sizes_of_another_integer_type():
    numpy = pytest.importorskip("numpy")
    cache = init_cache(CFG, numpy.int64(2), numpy.int32(4), num_spec=numpy.uint8(1))
    assert_bitwise(cache, init_cache(CFG, 2, 4, num_spec=1))


@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32", float, None],
    ids=str,
)
def test_dtypes_that_are_no_activation_dtypes(dtype):
    with pytest.raises(ContractError) as error:
        init_cache(CFG, 1, 4, dtype=dtype)
    assert str(error.value) == f"init_cache: dtype must be one of {FLOATS}, got {str(dtype).removeprefix('torch.')}."


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "privateuseone", 1.5])
def test_devices_that_are_not_here(device):
    with pytest.raises(ContractError) as error:
        init_cache(CFG, 1, 4, device=device)
    assert str(error.value).startswith(f"init_cache: device {str(device)!r} cannot be used here. ")


# ------------------------------------------------------------------------------------------------------------ no caches


CACHE = init_cache(CFG, 1, 4)
NO_CACHES = {
    "None": (None, "cache must be a ModelCache, got NoneType"),
    "dict": ({}, "cache must be a ModelCache, got dict"),
    "tuple": (tuple(CACHE), "cache must be a ModelCache, got tuple"),
    "layer": (CACHE.layers[0], "cache must be a ModelCache, got KDACache"),
    "list of layers": (CACHE._replace(layers=list(CACHE.layers)), "cache.layers must be a tuple, got list"),
    "no layer": (
        CACHE._replace(layers=(None, CACHE.layers[1])), "cache.layers[0] must be a KDACache or MLACache, got NoneType",
    ),
    "plain layer": (
        CACHE._replace(layers=(tuple(CACHE.layers[0]), CACHE.layers[1])),
        "cache.layers[0] must be a KDACache or MLACache, got tuple",
    ),
    "plain index": (
        CACHE._replace(layers=(CACHE.layers[0], CACHE.layers[1]._replace(index=()))),
        "cache.layers[1].index must be a IndexCache, got tuple",
    ),
    "list leaf": (
        CACHE._replace(layers=(CACHE.layers[0]._replace(conv=[1.0]), CACHE.layers[1])),
        "cache.layers[0].conv must be a Tensor, got list",
    ),
    "no leaf": (
        CACHE._replace(layers=(CACHE.layers[0], CACHE.layers[1]._replace(latent=None))),
        "cache.layers[1].latent must be a Tensor, got NoneType",
    ),
    "list of lengths": (CACHE._replace(length=[0]), "cache.length must be a Tensor, got list"),
}  # fmt: skip
PARAMS = inputs.params(CFG)
TAKERS = {
    "capacity": capacity,
    "fork": fork,
    "select": lambda cache: select(cache, [0]),
    "describe": describe,
    "cache_nbytes": cache_nbytes,
    "forward": lambda cache: forward(PARAMS, CFG, torch.tensor([[1]]), cache),
    "prefill": lambda cache: prefill(PARAMS, CFG, torch.tensor([[1]]), cache),
    "decode_step": lambda cache: decode_step(PARAMS, CFG, torch.tensor([1]), cache),
    "generate": lambda cache: generate(PARAMS, CFG, [1], max_new_tokens=1, cache=cache),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", NO_CACHES)
def test_what_is_no_cache(taker, kind):
    cache, text = NO_CACHES[kind]
    if cache is None and taker in ("forward", "generate"):
        pytest.skip("None makes a new one there")
    with pytest.raises(ContractError) as error:
        TAKERS[taker](cache)
    assert str(error.value) == f"{taker}: {text}. Use what init_cache or an earlier call returned."


# ------------------------------------------------------------------------------------------------------ fork and select


def test_fork_is_equal_and_shares_nothing():
    cache = numbered()
    copy = fork(cache)
    assert_bitwise(copy, cache)
    for x in pytree.tree_leaves(copy):
        x.fill_(7)
    assert_bitwise(cache, numbered())


@pytest.mark.parametrize("num_spec", [0, 2])
@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 1, 0], [], torch.tensor([2]), torch.tensor([0, 2], dtype=torch.int32)])
def test_select(rows, num_spec):
    cache = numbered(num_spec=num_spec)
    found = select(cache, rows)
    listed = rows.tolist() if isinstance(rows, torch.Tensor) else rows
    assert found.length.tolist() == listed
    assert found.length.dtype == torch.int32
    for x in pytree.tree_leaves(found):
        assert x.shape[0] == len(listed)
        assert [set(row.flatten().tolist()) for row in x] == [{number} for number in listed]
    for x in pytree.tree_leaves(found):
        x.fill_(9)
    assert_bitwise(cache, numbered(num_spec=num_spec))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], "select: rows must be in 0..2 for a cache of 3 rows, got [3]."),
        ([-1, 5], "select: rows must be in 0..2 for a cache of 3 rows, got [-1, 5]."),
        (torch.tensor([[0]]), "select: rows must be a list of row numbers, got int64 [1, 1]."),
        ([0.5], "select: rows must be a list of row numbers, got float32 [1]."),
        ("a", "select: rows must be a list of row numbers, got 'a'."),
        (None, "select: rows must be a list of row numbers, got None."),
        ([0, "b"], "select: rows must be a list of row numbers, got [0, 'b']."),
        ([[0], [0, 1]], "select: rows must be a list of row numbers, got [[0], [0, 1]]."),
        (torch.tensor([True, False, True]), "select: rows must be a list of row numbers, got bool [3]."),
    ],
)
def test_select_of_what_is_not_there(rows, message):
    with pytest.raises(ContractError) as error:
        select(numbered(), rows)
    assert str(error.value) == message


# ------------------------------------------------------------------------------------------------------------- describe


def test_describe():
    cache = init_cache(CFG, 2, 10, dtype=torch.float32)
    cache.length[1] = 4
    assert describe(cache).splitlines() == [
        "ModelCache: 2 rows, capacity 10 tokens, 3.258 KiB",
        "  length        [2] int32 8 B = [0, 4]",
        "  layers[0] KDACache",
        "    conv          [2, 3, 48] float32 1.125 KiB",
        "    state         [2, 2, 8, 8] float32 1 KiB",
        "  layers[1] MLACache",
        "    latent        [2, 10, 10] float32 800 B",
        "    index.pooled  [2, 3, 4] float32 96 B",
        "    index.tail    [2, 2, 4, 4] float32 256 B",
    ]
    assert cache_nbytes(cache) == 8 + 4 * (2 * 3 * 48 + 2 * 2 * 8 * 8 + 2 * 10 * 10 + 2 * 3 * 4 + 2 * 2 * 4 * 4)


def test_describe_without_a_limit_and_without_memory():
    text = describe(init_cache(inputs.config("K"), 1, 10, device="meta"))
    assert text.splitlines()[0].startswith("ModelCache: 1 row, no limit of tokens, ")
    assert "= [" not in text


def test_caches_are_immutable_pytrees():
    cache = init_cache(CFG, 1, 4)
    with pytest.raises(AttributeError):
        cache.length = torch.ones(1)
    leaves, spec = pytree.tree_flatten(cache)
    assert len(leaves) == 6
    assert isinstance(pytree.tree_unflatten(leaves, spec), ModelCache)
