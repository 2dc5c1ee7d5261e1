"""Samples of values: which changes of a tensor they show."""

import pytest
import torch
from torch import Tensor, nn

from tutti.replica.value_samples import ValueSamples


def _first_change(tensor: Tensor, index: tuple[int, ...]) -> int:
    """Return after how many samples a change of one element, made after each of them, is seen."""
    samples = ValueSamples([tensor])
    for number in range(1, 2000):
        samples.take()
        tensor.data[index] += 1
        if samples.changed() == [0]:
            return number
    raise AssertionError("a change was never seen")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128, torch.int8])
def test_a_whole_tensor_that_changes_without_a_new_version_is_seen_at_once(dtype: torch.dtype) -> None:
    first, second = torch.zeros(3, dtype=dtype), torch.ones(100, 70, dtype=dtype)
    samples = ValueSamples([first, second])
    for _ in range(3):
        samples.take()
        assert samples.changed() == []
    version = second._version
    second.data.add_(1)
    assert second._version == version
    assert samples.changed() == [1]
    second.data.sub_(1)
    assert samples.changed() == []


@pytest.mark.parametrize("index", [(0, 0), (41, 13), (99, 69)])
def test_one_element_that_changes_again_and_again_is_seen_in_time(index: tuple[int, int]) -> None:
    assert _first_change(torch.zeros(100, 70), index) <= 8 * (7000 // 64 + 1)
    assert _first_change(torch.zeros(70, 100).t(), index) <= 8 * (7000 // 64 + 1)
    assert _first_change(torch.zeros(4, 4), (3, 3)) == 1


def test_values_that_were_put_into_other_memory() -> None:
    parameter = nn.Parameter(torch.arange(1000.0))
    samples = ValueSamples([parameter])
    samples.take()
    parameter.data = parameter.data.clone()
    assert samples.changed() == []
    parameter.data = torch.zeros(1000)
    assert samples.changed() == [0]


def test_what_cannot_be_read_without_a_copy_is_not_judged() -> None:
    tensors = [torch.zeros(4, 6)[:, :3], torch.zeros(0), torch.zeros(2, 2, device="meta")]
    samples = ValueSamples(tensors)
    samples.take()
    tensors[0].data.add_(1)
    assert samples.changed() == []
