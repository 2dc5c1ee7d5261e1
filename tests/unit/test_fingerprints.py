"""Fingerprints of tensors: any change of a bit or of a position shows, and equal bits always give equal numbers."""

import pytest
import torch
from torch import Tensor

from tutti.job.checks.fingerprints import fingerprints, first_non_finite

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def _tensor(dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randint(0, 2 if dtype == torch.bool else 200, (numel,), generator=generator)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 2048, 5003])
def test_a_changed_element_and_a_changed_order_show(dtype: torch.dtype, numel: int) -> None:
    tensor = _tensor(dtype, numel)
    changed = tensor.clone()
    changed[numel // 2] = not changed[numel // 2] if dtype == torch.bool else changed[numel // 2] + 1
    assert fingerprints([tensor, tensor.clone()])[0] == fingerprints([tensor.clone()])[0]
    assert fingerprints([tensor]) != fingerprints([changed])
    moved = tensor.roll(1)
    if not torch.equal(moved, tensor):
        assert fingerprints([tensor]) != fingerprints([moved])


def test_the_place_in_memory_does_not_count() -> None:
    tensor = torch.arange(4001, dtype=torch.float32)
    assert fingerprints([tensor[1:]]) == fingerprints([tensor[1:].clone()])
    assert fingerprints([tensor[:4000].view(40, 100).t()]) == fingerprints(
        [tensor[:4000].view(40, 100).t().contiguous()]
    )
    assert fingerprints([torch.empty(0), torch.tensor(3)]) == fingerprints([torch.empty(0), torch.tensor(3)])


def test_the_first_tensor_that_is_not_finite() -> None:
    fine, whole = torch.ones(3), torch.arange(3)
    assert first_non_finite([fine, whole, torch.empty(0)]) is None
    assert first_non_finite([whole, fine, torch.tensor([1.0, float("inf")]), torch.tensor([float("nan")])]) == 2
    assert first_non_finite([torch.full((9,), 3e38, dtype=torch.bfloat16), -fine.double() * 1e308]) is None
