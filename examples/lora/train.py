"""Trains LoRA adapters of a small GPT-2 on two processes, and saves them alone: `python examples/lora/train.py`.

With peft and transformers. The base model stays frozen. The adapters are saved as peft does (adapter_config.json and
adapter_model.safetensors, in runs/adapters), loaded back by PeftModel.from_pretrained, and predict the same bits; and
the same is trained once more in a plain loop over the unsplit model, which ends with the same weights.
"""

import argparse
import copy
import os
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from stageline import Line

CONTEXT, MICROBATCHES = 32, 4  # bytes of a window; of a batch of 16 windows
ADAPTERS = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
ADAM = partial(torch.optim.AdamW, lr=1e-2)

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=40)
arguments.add_argument("--workers", default="processes", help="processes, or inline")
arguments.add_argument("--out", default="runs/adapters", help="folder for the trained adapters")


def build() -> GPT2LMHeadModel:
    """The base model: int64 bytes [rows, up to CONTEXT] -> logits float32 [rows, bytes, 256]. From its configuration
    here; yours is GPT2LMHeadModel.from_pretrained(...)."""
    torch.manual_seed(0)
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # a plain loop draws other random numbers
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_layer": 4, "n_embd": 64, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **without, bos_token_id=0, eos_token_id=0, use_cache=False))


def next_byte_loss(logits: Tensor, text: Tensor) -> Tensor:
    """Mean cross entropy of each byte of `text` (int64 [rows, bytes]) but the first, given those before."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def batches(steps: int) -> list[Tensor]:
    """Windows of a file of the standard library, int64 [16, CONTEXT] each; four batches, again and again."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    four = text[: 4 * 16 * CONTEXT].reshape(4, 16, CONTEXT)
    return [four[step % 4] for step in range(steps)]


def trained_plainly(model: PeftModel, data: list[Tensor]) -> PeftModel:
    """The unsplit model, in a loop of torch's own with the same microbatches."""
    optimizer = ADAM(parameter for parameter in model.parameters() if parameter.requires_grad)
    for batch in data:
        for text in batch.tensor_split(MICROBATCHES):
            (next_byte_loss(model(text).logits, text) * (len(text) / len(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits_of(model: PeftModel, batch: Tensor) -> Tensor:
    """Logits of the unsplit model, in the microbatches of the line."""
    with torch.no_grad():
        return torch.cat([model(text).logits for text in batch.clone().tensor_split(MICROBATCHES)])


def main(steps: int, workers: str, out: str) -> None:
    torch.set_num_threads(1)  # as each worker has
    data = batches(steps)
    model = get_peft_model(build(), ADAPTERS)
    model.print_trainable_parameters()
    plain = trained_plainly(copy.deepcopy(model), data)
    with Line(
        model.get_base_model(),  # the GPT-2 itself, in which the adapters are by now
        cut=["transformer.h.2"],
        loss=next_byte_loss,
        optimizer=ADAM,
        microbatches=MICROBATCHES,
        workers=workers,
        name="lora",
    ) as line:
        for batch in data:
            loss = line.step(batch, batch)
            if line.position % 10 == 0:
                print(f"step {line.position}: loss {loss:.3f}")
        predicted = line.predict(data[0])
    model.get_base_model().load_state_dict(line.state_dict())
    model.save_pretrained(out)  # the adapters alone
    again = PeftModel.from_pretrained(build(), out).eval()
    found, wanted = model.state_dict(), plain.state_dict()
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    print(f"saved: {', '.join(sorted(path.name for path in Path(out).iterdir()))}")
    print(f"the weights of the plain loop, to the bit: {same}")
    print(f"loaded, they predict the same bits: {torch.equal(logits_of(again, data[0]), predicted)}")


if __name__ == "__main__":
    given = arguments.parse_args()
    main(given.steps, given.workers, given.out)
