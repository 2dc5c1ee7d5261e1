"""Tensor-parallel plans: styles that are chosen, printed, requested and refused."""

import pytest
from torch import nn

import tutti
from tutti.errors import ConfigError
from tutti.parallel.tensor.plan import nothing_split_mistakes
from tutti.recipes.models import CharGPT, CharLSTM, FashionCNN, mlp


def _styles(model: nn.Module, num_ranks: int = 2, split: dict[str, str] | None = None) -> dict[str, str]:
    plan = tutti.tensor_plan(model, num_ranks, split)  # type: ignore[arg-type]
    return {layer.name: layer.style for layer in plan.layers}


class Attention(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(12, 12) for _ in range(4))


def test_linear_layers_in_pairs() -> None:
    assert _styles(mlp(8, 16, 16, 4)) == {"0": "colwise", "2": "rowwise", "4": "colwise"}


def test_a_transformer() -> None:
    styles = _styles(CharGPT(21, context=8, width=16, num_heads=4, num_blocks=1))
    assert styles == {
        "embedding": "vocabulary",
        "position": "vocabulary",
        "blocks.0.norm_attention": "replicate",
        "blocks.0.query_key_value": "heads",
        "blocks.0.project": "rowwise",
        "blocks.0.norm_mlp": "replicate",
        "blocks.0.mlp.0": "colwise",
        "blocks.0.mlp.2": "rowwise",
        "norm": "replicate",
        "output": "colwise",
    }


def test_attention_by_three_layers() -> None:
    assert _styles(Attention(4)) == {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
    assert set(_styles(Attention(3)).values()) == {"replicate"}  # Three heads for two ranks.


def test_convolutions_by_channel() -> None:
    styles = _styles(FashionCNN())
    assert (styles["features.0"], styles["features.3"]) == ("colwise", "rowwise")
    assert _styles(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))) == {"0": "replicate"}


def test_printed_as_a_table() -> None:
    lines = str(tutti.tensor_plan(CharLSTM(21), 2)).splitlines()
    assert lines[0] == "over 2 ranks:"
    assert lines[1].split() == ["layer", "kind", "weight", "style", "why"]
    assert lines[3].split("  ")[0] == "lstm"
    assert "replicate" in lines[3]
    assert "no rule for LSTM" in lines[3]


def test_requested_styles() -> None:
    requested = {"blocks.*.mlp.?": "replicate", "output": "rowwise"}
    styles = _styles(CharGPT(21, context=8, width=16, num_heads=4, num_blocks=2), 2, requested)
    assert {styles[f"blocks.{block}.mlp.{layer}"] for block in (0, 1) for layer in (0, 2)} == {"replicate"}
    assert styles["output"] == "rowwise"


REFUSED = {
    "unknown layer": ({"9": "colwise"}, r"no layer with parameters is called '9'"),
    "no such style": ({"0": "columns"}, r"layer '0' \(Linear\) cannot be 'columns': there is no such style"),
    "another layer's style": ({"0": "vocabulary"}, r"layer .* a Linear can be colwise, rowwise, heads or replicate"),
    "too few": ({"4": "colwise"}, r"layer '4' \(Linear\) .*: its size there is 3, less than 4 ranks"),
    "heads": ({"0": "heads"}, r"its 16 outputs are not queries, keys and values of 4 equal parts"),
    "only replicate": ({"5": "colwise"}, r"layer '5' \(LayerNorm\) .*: a LayerNorm can only be replicate"),
}


@pytest.mark.parametrize(("split", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(split: dict[str, str], message: str) -> None:
    model = nn.Sequential(*mlp(8, 16, 16, 3), nn.LayerNorm(3))
    with pytest.raises(ConfigError, match=message):
        _styles(model, 4, split)


def test_a_model_of_which_nothing_can_be_split() -> None:
    (mistake,) = nothing_split_mistakes(tutti.tensor_plan(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)), 5))
    assert "none of the model's layers can be split over 5 ranks" in mistake
    assert "'0' (LayerNorm): no rule for LayerNorm; '1' (Linear): its size there is 1, less than 5 ranks" in mistake


def test_a_table_that_must_be_replicated() -> None:
    assert _styles(nn.Sequential(nn.Embedding(10, 4, padding_idx=0))) == {"0": "replicate"}
