"""A GPT-2 of transformers, from a configuration that is written here: 6 blocks of width 128, which read bytes.

Its embeddings and its head are one parameter, as in the original: the first stage and the last train it together.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 128  # bytes of a window


def build(blocks: int = 6, width: int = 128) -> GPT2LMHeadModel:
    """int64 bytes [rows, up to CONTEXT] -> logits float32 [rows, bytes, 256]."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_layer=blocks,
        n_embd=width,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def next_byte_loss(logits: Tensor, text: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of each byte of `text` (int64 [rows, bytes]) but the first, given those before."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def bits_per_byte(logits: Tensor, text: Tensor) -> Tensor:
    """The same in bits: 8 for a model that knows nothing."""
    return next_byte_loss(logits, text) / 0.6931471805599453
