from __future__ import annotations

import collections
import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tmover.errors import StateError
from tmover.state import tree

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
KEYS = st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.binary()
TREES: st.SearchStrategy[Any] = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors = tree.Tensors()
    data = tree.encode(tree.pack(value, tensors))
    return tree.unpack(tree.decode(data), tensors.held)


def alike(left: Any, right: Any) -> bool:
    """Equal, of equal types, NaN being NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return [*left] == [*right] and all(alike(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    return repr(left) == repr(right)


@given(TREES)
def test_what_is_packed_comes_back_with_its_types(value: Any) -> None:
    assert alike(there_and_back(value), value)


@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(StateError):
        tree.unpack(tree.decode(data))


@given(TREES, st.data())
def test_a_header_with_a_byte_changed_is_read_or_refused(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(tree.encode(tree.pack(value, tree.Tensors())))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))

    with contextlib.suppress(StateError):
        tree.unpack(tree.decode(encoded))


def test_an_integer_beyond_64_bits_survives() -> None:
    assert there_and_back([1 << 200, -(1 << 200), (1 << 63) - 1, -(1 << 63)]) == [
        1 << 200,
        -(1 << 200),
        (1 << 63) - 1,
        -(1 << 63),
    ]


def test_a_counter_comes_back_as_a_counter() -> None:
    back = there_and_back(collections.Counter({30: 1, 80: 2}))

    assert type(back) is collections.Counter
    assert back == {30: 1, 80: 2}


def test_keys_keep_their_types() -> None:
    assert there_and_back({1: "int", "1": "str", (1, "a"): "tuple"}) == {
        1: "int",
        "1": "str",
        (1, "a"): "tuple",
    }


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3)),
        np.array(5, dtype=np.int8),
        np.array(["a", "bc"]),
        np.array([1, 2], dtype=">i4"),
    ],
)
def test_an_array_survives(array: np.ndarray[Any, Any]) -> None:
    back = there_and_back({"a": array})["a"]

    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()


def test_an_array_that_came_can_be_written_to() -> None:
    back = there_and_back(np.zeros(3))
    back[0] = 1
    assert back[0] == 1


def test_a_numpy_scalar_survives() -> None:
    back = there_and_back([np.float64(0.1), np.int32(4)])

    assert [type(value) for value in back] == [np.float64, np.int32]
    assert back == [0.1, 4]


def test_a_tensor_that_occurs_twice_is_held_once() -> None:
    tensor = torch.ones(2)
    tensors = tree.Tensors()

    packed = tree.pack({"a": tensor, "b": [tensor]}, tensors)

    assert tensors.held == [tensor]
    assert tree.unpack(packed, tensors.held)["b"][0] is tensor


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"hook": len}, "['hook'] is a function"),
        ({"hook": lambda: None}, "['hook'] is a function"),
        ({"a": [0, {1, 2}]}, "['a'][1] is a set"),
        ({"a": (0, frozenset())}, "['a'][1] is a set"),
        ({"g": (x for x in [1])}, "['g'] is a generator"),
        ({"c": Custom()}, "['c'] is a `"),
        ({"c": Custom}, "['c'] is a class"),
        ({"m": math}, "['m'] is a module"),
        ({"b": "x".join}, "['b'] is a function"),
        ({"d": collections.defaultdict(int)}, "['d'] is a `collections.defaultdict`"),
        ({"o": np.array([object()])}, "['o'] is a `numpy.ndarray`"),
        ({"t": torch.zeros(1), "s": torch.zeros(2).to_sparse()}, "['s'] is a sparse"),
        ({"m": torch.zeros(1, device="meta")}, "['m'] is on the meta device"),
        ({frozenset({1}): 0}, "key of state[frozenset({1})] is a set"),
        ({torch.zeros(1): 0}, "keys are numbers"),
        ({"s": "\ud800"}, "['s'] is text that UTF-8 cannot hold"),
    ],
)
def test_what_is_no_plain_value_is_refused_with_its_path(value: Any, words: str) -> None:
    with pytest.raises(StateError) as caught:
        tree.pack(value, tree.Tensors(), "state")

    assert words in str(caught.value)
    assert str(caught.value).startswith(("state", "key of state"))


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(StateError, match="nested too deeply, or contains itself"):
        tree.pack(loop, tree.Tensors(), "state")


def test_a_reference_to_a_tensor_that_does_not_exist_is_refused() -> None:
    with pytest.raises(StateError, match="makes no sense"):
        tree.unpack(["tensor", 3], [torch.zeros(1)])
    with pytest.raises(StateError, match="makes no sense"):
        tree.unpack(["tensor", -1], [torch.zeros(1)])
