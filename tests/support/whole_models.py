"""Models that are not an nn.Sequential, small, and plain loops that train them unsplit: plain torch and transformers.

Random numbers are seeded by forward pre-hooks on the first module that each of the model's layers calls.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import sha256
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .pages import named_files
from .paths import DOCS
from .resnet import resnet18

os.environ["HF_HUB_OFFLINE"] = "1"

ROWS, WORDS, LABELS = 5, 50, 3
ADAM = partial(torch.optim.AdamW, lr=0.01)


@dataclass(frozen=True)
class WholeModel:
    """`seeded` are the modules before which the random numbers are seeded; `cuts`, by stages, two cuts of each."""

    build: Callable[[], Any]
    batch: Callable[[torch.Generator], tuple[Any, Tensor]]
    seeded: tuple[str, ...]
    cuts: Mapping[int, tuple[list[int | str], list[int | str]]]
    layers: Callable[[Any], Any] = lambda model: model  # what is cut, of the model

    def made(self) -> Any:
        """Each time with the same weights."""
        torch.manual_seed(3)
        return self.build()

    def batches(self, steps: int) -> list[tuple[Any, Tensor]]:
        return [self.batch(torch.Generator().manual_seed(step)) for step in range(steps)]


def mean_loss(logits: Any, targets: Tensor) -> Tensor:
    """A mean over rows; the logits' dimension of labels is the last one, or, in images, the second."""
    logits = logits["logits"] if isinstance(logits, dict) else logits
    scores = logits.movedim(1, -1) if logits.dim() == 4 else logits
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def train_whole(
    whole: WholeModel, steps: int, microbatches: int, seed: int = 0
) -> tuple[dict[str, Tensor], list[float]]:
    """The state and the losses after a plain loop of `model(**inputs).logits`."""
    model, losses, place = whole.made(), [], [0, 0]
    seed_calls(model, whole.seeded, partial(_seed, place, seed))
    optimizer = ADAM(model.parameters())
    for step, (inputs, targets) in enumerate(whole.batches(steps)):
        parts = []
        slices = zip(split(inputs, microbatches), targets.tensor_split(microbatches), strict=True)
        for number, (x, y) in enumerate(slices):
            place[:] = [step, number]
            loss = mean_loss(logits_of(model, x), y) * (len(y) / len(targets))
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(reduce(torch.add, parts).item())
    return model.state_dict(), losses


def seed_calls(model: Any, calls: Sequence[str], seed: Callable[[int], None]) -> None:
    """Seed before the call that begins each layer: `block@2` is the second call of `block` in a forward."""
    layers: dict[str, list[int]] = {}
    for layer, call in enumerate(calls):
        layers.setdefault(call.partition("@")[0], []).append(layer)
    for name, numbers in layers.items():
        following = cycle(numbers)
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, following=following: seed(next(following)), prepend=True
        )


def logits_of(model: Any, inputs: Any) -> Tensor:
    found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return found if isinstance(found, Tensor) else found.logits


def split(inputs: Any, microbatches: int) -> list[Any]:
    if isinstance(inputs, Tensor):
        return list(inputs.tensor_split(microbatches))
    parts = {name: tensor.tensor_split(microbatches) for name, tensor in inputs.items()}
    return [{name: tensor[number] for name, tensor in parts.items()} for number in range(microbatches)]


def _seed(place: list[int], seed: int, layer: int, *_: object) -> None:
    digest = sha256(f"{seed}/{place[0]}/{place[1]}/{layer}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))


def _ids(generator: torch.Generator) -> Tensor:
    """As many tokens in a row as the batch has by chance."""
    tokens = int(torch.randint(4, 9, (), generator=generator))
    return torch.randint(WORDS, (ROWS, tokens), generator=generator)


def _padding(ids: Tensor, generator: torch.Generator) -> Tensor:
    """1 for each row's tokens, 0 for what fills it up."""
    tokens = ids.shape[1]
    return (torch.arange(tokens) < torch.randint(2, tokens + 1, (ROWS, 1), generator=generator)).long()


def gpt2(**settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **settings))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_ENCODER))


def layoutlm() -> Any:
    from transformers import LayoutLMConfig, LayoutLMForTokenClassification

    return LayoutLMForTokenClassification(LayoutLMConfig(**_ENCODER, max_2d_position_embeddings=32))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    width = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(**width, **sizes, **dropout, num_labels=LABELS))


def page_unet() -> dict[str, Any]:
    """The U-Net of docs/guides/models.md, and its layers, by their names there."""
    found: dict[str, Any] = {"__name__": "unet"}
    exec(compile(named_files(DOCS / "guides/models.md")["unet.py"], "unet.py", "exec"), found)  # noqa: S102  # our own page
    return found


_ENCODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "num_labels": LABELS,
}


def _language(generator: torch.Generator) -> tuple[Any, Tensor]:
    ids = _ids(generator)
    return ids, ids.roll(-1, 1)


def _padded_language(generator: torch.Generator) -> tuple[Any, Tensor]:
    ids = _ids(generator)
    return {"input_ids": ids, "attention_mask": _padding(ids, generator)}, ids.roll(-1, 1)


def _sequences(generator: torch.Generator) -> tuple[Any, Tensor]:
    inputs, targets = _padded_language(generator)
    kinds = torch.randint(2, targets.shape, generator=generator)
    return {**inputs, "token_type_ids": kinds}, torch.randint(LABELS, (ROWS,), generator=generator)


def _pages(generator: torch.Generator) -> tuple[Any, Tensor]:
    inputs, targets = _padded_language(generator)
    corners = torch.randint(16, (*targets.shape, 2), generator=generator)
    return {**inputs, "bbox": torch.cat([corners, corners + 5], dim=2)}, targets % LABELS


def _images(generator: torch.Generator) -> tuple[Any, Tensor]:
    pixels = torch.randn(ROWS, 1, 8, 8, generator=generator)
    return pixels, torch.randint(LABELS, (ROWS,), generator=generator)


def _photos(generator: torch.Generator) -> tuple[Any, Tensor]:
    pixels = torch.randn(ROWS, 3, 64, 64, generator=generator)
    return pixels, torch.randint(LABELS, (ROWS,), generator=generator)


def _masks(generator: torch.Generator) -> tuple[Any, Tensor]:
    pixels = torch.randn(ROWS, 1, 8, 8, generator=generator)
    return pixels, (pixels[:, 0] > 0).long()


def _blocks(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{number}" for number in range(4))


def _cuts(prefix: str, last: str) -> dict[int, tuple[list[int | str], list[int | str]]]:
    return {
        2: ([f"{prefix}.2"], [1]),
        3: ([f"{prefix}.1", f"{prefix}.3"], [2, last]),
        4: ([1, 2, f"{prefix}.3"], [f"{prefix}.2", f"{prefix}.3", last]),
    }


_GPT2 = (
    ("transformer.wte", *_blocks("transformer.h"), "transformer.ln_f", "lm_head"),
    _cuts("transformer.h", "lm_head"),
)
WHOLE_MODELS = {
    "gpt2": WholeModel(partial(gpt2, tie_word_embeddings=False), _language, *_GPT2),
    "gpt2 tied": WholeModel(gpt2, _language, *_GPT2),
    "gpt2 with padding": WholeModel(partial(gpt2, tie_word_embeddings=False), _padded_language, *_GPT2),
    "llama": WholeModel(
        llama,
        _padded_language,
        ("model.embed_tokens", *_blocks("model.layers"), "model.norm", "lm_head"),
        _cuts("model.layers", "lm_head"),
    ),
    "bert": WholeModel(
        bert,
        _sequences,
        ("bert.embeddings", *_blocks("bert.encoder.layer"), "bert.pooler", "dropout"),
        _cuts("bert.encoder.layer", "classifier"),
    ),
    "layoutlm": WholeModel(
        layoutlm,
        _pages,
        ("layoutlm.embeddings", *_blocks("layoutlm.encoder.layer"), "dropout"),
        _cuts("layoutlm.encoder.layer", "classifier"),
    ),
    "vit": WholeModel(
        vit,
        _images,
        ("vit.embeddings", *_blocks("vit.layers"), "vit.layernorm", "classifier"),
        _cuts("vit.layers", "classifier"),
    ),
    "resnet18": WholeModel(
        partial(resnet18, 4, LABELS),
        _photos,
        ("conv1", *(f"layer{group}.{block}" for group in range(1, 5) for block in range(2)), "avgpool", "fc"),
        {
            2: (["layer3"], ["layer1.1"]),
            3: (["layer2", "layer4"], [1, "fc"]),
            4: (["layer1.1", "layer2.1", "layer4.1"], ["layer2", "layer3", "avgpool"]),
        },
    ),
    "u-net": WholeModel(
        lambda: page_unet()["UNet"](),
        _masks,
        ("down1", "down2", "middle", "up2", "up1", "head"),
        {
            2: (["middle"], ["up1"]),
            3: (["down2", "up2"], [2, "head"]),
            4: (["down2", "middle", "up2"], ["middle", "up1", "head"]),
        },
        lambda model: page_unet()["layers"](model),
    ),
}
