"""A user's list of layers has all of the model, under the model's names, or is refused."""

import pytest
import torch
from torch import Tensor, nn

from stageline import Layer, Layers, ModelRefused
from stageline.pipeline.model.cut import cut_model


class Encoder(nn.Module):
    """With a parameter and a buffer of its own, and an embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 4))
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def embed(ids: Tensor, embed: nn.Module, first: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([first.expand(len(ids), -1, -1), embed(ids) * scale], 1)


EMBED, FIRST, SECOND, HEAD = (
    Layer(("embed", "first", "scale"), embed),
    Layer("blocks.0"),
    Layer("blocks.1"),
    Layer("head"),
)


def test_the_state_of_the_layers_is_the_models():
    model = Encoder()
    (whole,) = cut_model(Layers(model, [EMBED, FIRST, SECOND, HEAD]))
    assert whole.names == ("embed", "blocks.0", "blocks.1", "head")
    assert whole.weight_names == model.state_dict().keys()
    assert {name for name, _ in whole.state} - model.state_dict().keys() == {"scale"}


def test_what_layers_share_counts_once_and_for_the_first_stage_that_uses_it():
    model = Encoder()
    (whole,) = cut_model(Layers(model, [EMBED, FIRST, SECOND, HEAD]))
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    parts = cut_model(Layers(model, [EMBED, FIRST, SECOND, HEAD]), ["head"])
    assert sum(part.parameters for part in parts) == whole.parameters
    assert parts[1].weight_names == {"head.weight"}


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([EMBED, FIRST, HEAD], r"blocks.1.weight, blocks.1.bias of the Encoder would be in no stage"),
        ([Layer("embed"), FIRST, SECOND, HEAD], "first, scale of the Encoder would be in no stage"),
        (
            [EMBED, Layer("blocks.2"), SECOND, HEAD],
            "no module, parameter or buffer 'blocks.2'; its names include blocks.1",
        ),
        ([EMBED, FIRST, FIRST, SECOND, HEAD], "two layers are called blocks.0"),
        ([], "first, embed.weight, blocks.0.weight, blocks.0.bias and 4 more of the Encoder"),
    ],
    ids=range(5),
)
def test_a_list_that_is_not_the_models_is_refused(layers, reason):
    with pytest.raises(ModelRefused, match=reason):
        Layers(Encoder(), layers)


def test_a_layer_of_several_modules_needs_a_function():
    with pytest.raises(ModelRefused, match=r"Layer\(\('a', 'b'\)\) needs a function of its parts"):
        Layer(("a", "b"))
    with pytest.raises(ModelRefused, match="needs a module"):
        Layer(())
