"""Work and depth of layers, against the table of Ben-Nun and Hoefler (2019) and against counts by hand."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tutti.errors import ConfigError
from tutti.plan.profile.work_depth import NO_WORK, WORK_COUNTERS, LayerWork, WorkDepth, layer_work


def of(module: nn.Module, *inputs: torch.Tensor) -> LayerWork:
    output = module(*inputs)
    outputs = [output] if isinstance(output, torch.Tensor) else [leaf for leaf in output if leaf is not None]
    return layer_work(module, inputs, outputs)


def test_fully_connected() -> None:
    found = of(nn.Linear(64, 16), torch.zeros(8, 64))
    assert [each.work for each in found] == [8 * 64 * 16] * 3
    assert [each.depth for each in found] == [1 + 6, 1 + 3, 1 + 4], "sums over C_in, N and C_out"


def test_rows_of_all_dimensions_count_as_samples() -> None:
    assert of(nn.Linear(64, 16), torch.zeros(2, 4, 64)) == of(nn.Linear(64, 16), torch.zeros(8, 64))


def test_convolution() -> None:
    found = of(nn.Conv2d(4, 8, kernel_size=3, padding=1), torch.zeros(2, 4, 16, 16))
    assert [each.work for each in found] == [2 * 8 * 4 * 16 * 16 * 3 * 3] * 3
    assert found.output.depth == 1 + math.ceil(math.log2(3 * 3 * 4))
    assert found.by_weights.depth == 1 + math.log2(2 * 16 * 16)
    assert found.by_input.depth == 1 + math.ceil(math.log2(3 * 3 * 8))


def test_a_convolution_of_single_pixels_is_fully_connected() -> None:
    assert of(nn.Conv2d(64, 16, 1), torch.zeros(8, 64, 1, 1)) == of(nn.Linear(64, 16), torch.zeros(8, 64))


def test_groups_and_strides_divide_the_work() -> None:
    x = torch.zeros(2, 8, 16, 16)
    whole = of(nn.Conv2d(8, 8, 2), x[..., :15, :15].contiguous())
    assert of(nn.Conv2d(8, 8, 2, groups=4), x[..., :15, :15]).output.work == whole.output.work / 4
    assert of(nn.Conv2d(8, 8, 2, stride=2), x).output.work == 2 * 8 * 8 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(12, 7, bias=False), (5, 12)),
        (nn.Conv1d(3, 6, 5, stride=2), (2, 3, 31)),
        (nn.Conv2d(4, 6, (3, 2), padding=1), (2, 4, 9, 8)),
        (nn.Conv3d(2, 4, 2), (1, 2, 5, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_products_agree_with_torchs_own_count(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = module(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    found = layer_work(module, [x], [output])
    assert 2 * found.output.work == forward, "torch counts a multiplication and its addition as two"
    assert 2 * found.needed(True, True).work == counter.get_total_flops()


def test_activation_and_view() -> None:
    assert of(nn.ReLU(), torch.zeros(4, 5)).output == (20, 1)
    assert of(nn.ReLU(), torch.zeros(4, 5)).by_input == (20, 1)
    assert of(nn.Flatten(), torch.zeros(4, 5, 6)) == (NO_WORK, NO_WORK, NO_WORK)


@pytest.mark.parametrize("module", [nn.MaxPool2d(4), nn.AvgPool2d((4, 4)), nn.AdaptiveAvgPool2d(4)])
def test_pooling(module: nn.Module) -> None:
    found = of(module, torch.zeros(2, 3, 16, 16))
    assert found.output == (2 * 3 * 16 * 16, 4), "log2 of the window's width and height"
    assert found.by_weights == NO_WORK
    assert found.by_input == (2 * 3 * 16 * 16, 1)


def test_norms() -> None:
    flat = of(nn.BatchNorm1d(16), torch.rand(8, 16))
    assert flat.output == flat.by_weights == flat.by_input == (8 * 16, 1 + 3), "the table's log N"
    assert of(nn.BatchNorm2d(4), torch.rand(8, 4, 2, 2)).output.depth == 1 + 5, "positions are averaged too"
    layer = of(nn.LayerNorm(32), torch.rand(8, 4, 32))
    assert (layer.output.depth, layer.by_weights.depth, layer.by_input.depth) == (1 + 5, 1 + 5, 1 + 5)
    assert of(nn.LayerNorm(32), torch.rand(2, 32)).by_weights.depth == 1 + 1
    group = of(nn.GroupNorm(2, 8), torch.rand(4, 8, 4, 4))
    assert (group.output.depth, group.by_weights.depth) == (1 + 6, 1 + 6)
    assert of(nn.InstanceNorm2d(8), torch.rand(4, 8, 4, 4)).output.depth == 1 + 4


def test_embedding_has_no_gradient_by_its_input() -> None:
    found = of(nn.Embedding(100, 8), torch.zeros(4, 16, dtype=torch.int64))
    assert found == ((4 * 16 * 8, 1), (4 * 16 * 8, 1 + 6), NO_WORK)


def test_a_recurrent_layers_depth_grows_with_length_and_a_dense_ones_does_not() -> None:
    short, long = (of(nn.LSTM(8, 24, batch_first=True), torch.zeros(4, length, 8)) for length in (10, 20))
    assert long.output.work == 2 * short.output.work == 2 * (4 * 10) * 4 * 24 * (8 + 24)
    assert long.output.depth == 2 * short.output.depth
    assert of(nn.Linear(8, 24), torch.zeros(4, 20, 8)).output.depth == 1 + 3


def test_stacked_recurrent_layers_overlap_unless_they_go_both_ways() -> None:
    x = torch.zeros(10, 4, 16)
    one, stacked = of(nn.GRU(16, 16), x), of(nn.GRU(16, 16, num_layers=3), x)
    assert stacked.output.work == 3 * one.output.work
    assert stacked.output.depth == one.output.depth * 12 / 10
    both = of(nn.GRU(16, 8, num_layers=3, bidirectional=True), x)
    assert both.output.depth > 2 * stacked.output.depth


def test_a_sequence_of_one_is_a_cell() -> None:
    assert of(nn.RNN(6, 10), torch.zeros(1, 4, 6)) == of(nn.RNNCell(6, 10), torch.zeros(4, 6))
    whole, cell = of(nn.LSTM(6, 10), torch.zeros(1, 4, 6)), of(nn.LSTMCell(6, 10), torch.zeros(4, 6))
    assert whole == cell


def test_attention_is_quadratic_in_length() -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    works = []
    for length in (8, 16):
        x = torch.zeros(2, length, 16)
        works.append(of(layer, x, x, x).output.work)
    assert works == [4 * 2 * length * 16 * 16 + 2 * 2 * length * length * 16 for length in (8, 16)]


def test_what_nobody_needs_is_not_counted() -> None:
    found = of(nn.Linear(64, 16), torch.zeros(8, 64))
    once = 8 * 64 * 16
    assert found.needed(weights=True, inputs=True) == (3 * once, 7 + 5), "the longer of the two ways back"
    assert found.needed(weights=True, inputs=False) == (2 * once, 7 + 4)
    assert found.needed(weights=False, inputs=False) == (once, 7)


def test_unknown_layers_are_elementwise_and_derived_ones_like_their_base() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Wide(nn.Linear):
        pass

    assert of(Odd(), torch.zeros(3, 4)) == of(nn.ReLU(), torch.zeros(3, 4))
    assert of(Wide(4, 4), torch.zeros(3, 4)) == of(nn.Linear(4, 4), torch.zeros(3, 4))
    assert Odd not in WORK_COUNTERS
    assert Wide not in WORK_COUNTERS


def test_brents_bounds() -> None:
    cost = WorkDepth(1000, 10)
    assert cost.parallelism == 100
    assert cost.bounds(1) == (1000, 1010)
    assert cost.bounds(100) == (10, 20)
    assert cost.bounds(10**6) == (10, pytest.approx(10.001)), "never below the longest chain"
    with pytest.raises(ConfigError, match="1 processor or more, got 0"):
        cost.bounds(0)
    assert NO_WORK.parallelism == 0
