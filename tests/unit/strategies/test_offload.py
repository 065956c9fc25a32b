"""Offloading and onloading of storages: all views of a storage have the same values again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from roll.models import offload
from roll.models.offload import Offload, storages, tensors_in


@dataclass
class Bucket:
    """Stands in for ZeRO's objects that hold buffers."""

    buffer: Tensor
    elements: int = 0


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_views_see_the_values_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE", 12)  # several pieces, the last one shorter
    flat = torch.arange(10.0)
    view, parameter = flat[2:5], nn.Parameter(flat[5:])
    parameter.grad = torch.full((5,), 3.0)
    store = Offload("cpu")
    for _ in range(3):
        store.offload(tensors_in([parameter]))
        assert (size(flat), size(view), size(parameter.grad)) == (0, 0, 0)
        store.onload()
        assert flat.tolist() == [float(number) for number in range(10)]
        assert view.tolist() == [2.0, 3.0, 4.0] and parameter.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]
        assert parameter.grad.tolist() == [3.0] * 5
    view += 1
    assert flat[2:5].tolist() == [3.0, 4.0, 5.0]


def test_offloaded_values_are_the_latest() -> None:
    values = torch.zeros(4)
    store = Offload("cpu")
    store.offload([values])
    store.onload()
    values += 7
    store.offload([values])
    store.onload()
    assert values.tolist() == [7.0] * 4


def test_constant_values_are_copied_once() -> None:
    values = torch.ones(4)
    store = Offload("cpu", constant=True)
    for expected in (1.0, 1.0):
        store.offload([values])
        assert size(values) == 0
        store.onload()
        assert values.tolist() == [expected] * 4
        values += 1  # the first copy is restored, because the values were declared constant


def test_leaving_and_coming_twice_is_once() -> None:
    values = torch.ones(4)
    store = Offload("cpu")
    store.onload()
    store.offload([values])
    store.offload([values])
    store.onload()
    store.onload()
    assert values.tolist() == [1.0] * 4


def test_tensors_are_found_in_containers_attributes_and_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    partition = torch.ones(3)
    parameter.ds_tensor = partition  # pyright: ignore[reportAttributeAccessIssue]
    inside = torch.ones(4)
    keys, bucket, more = torch.ones(5), Bucket(torch.ones(6)), torch.ones(7)
    loop: list[object] = [more]
    loop.append(loop)
    found = tensors_in({"a": [(parameter,)], keys: deque([inside])}, bucket, loop, None, 3, "text", Bucket)
    expected = [parameter, parameter.grad, partition, inside, keys, bucket.buffer, more]
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in expected}


def test_storages_are_unique_and_of_their_device() -> None:
    flat = torch.ones(8)
    assert len(storages([flat, flat[:2], flat[3:]], "cpu")) == 1
    assert storages([flat, torch.empty(0)], "cuda") == []
    assert storages([torch.empty(0), torch.empty(3, device="meta")], "cpu") == []
