"""`weights_sha256` is what a plain script computes from the definition, whatever the tensors' layout and the cut."""

import hashlib
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.digest import differing_copies, tensor_digests, weights_sha256


def by_the_definition(state_dict: Mapping[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for name, t in sorted(state_dict.items()):
        raw = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
        whole.update(name.encode() + b"\0" + str(t.dtype).removeprefix("torch.").encode() + b"\0")
        whole.update(",".join(str(n) for n in t.shape).encode() + b"\0" + hashlib.sha256(raw).digest())
    return whole.hexdigest()


def test_it_is_the_digest_a_plain_script_computes():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2, dtype=torch.bfloat16))
    assert weights_sha256(tensor_digests(model.state_dict())) == by_the_definition(model.state_dict())


def test_the_stages_digests_together_are_the_models():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    state = model.state_dict()
    first, second = ({k: v for k, v in state.items() if k[0] in part} for part in ("01", "2"))
    assert weights_sha256(tensor_digests(second) | tensor_digests(first)) == by_the_definition(state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(7).expand(4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        nn.Parameter(torch.ones(2)),
    ],
    ids=[
        "zero-dimensional",
        "empty",
        "transposed",
        "channels_last",
        "expanded",
        "bool",
        "complex",
        "float8",
        "parameter",
    ],
)
def test_any_dtype_and_layout_has_a_digest(tensor: Tensor):
    assert weights_sha256(tensor_digests({"t": tensor})) == by_the_definition({"t": tensor.detach()})


def test_name_dtype_and_shape_count():
    zeros = torch.zeros(4)
    variants = [{"a": zeros}, {"b": zeros}, {"a": zeros.view(torch.int32)}, {"a": zeros.view(2, 2)}]
    assert len({weights_sha256(tensor_digests(v)) for v in variants}) == len(variants)


def test_an_entry_that_is_not_a_tensor_is_named():
    with pytest.raises(TypeError, match=r"'0\._extra_state' is of type dict"):
        tensor_digests({"0._extra_state": {}})  # type: ignore[dict-item]


def test_combining_digests_needs_no_torch():
    lines = [
        "import sys, stageline.pipeline.digest",
        "stageline.pipeline.digest.weights_sha256({'a': ('float32', (1,), 'ab' * 32)})",
        "sys.exit('torch' in sys.modules)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 0


def test_copies_of_one_parameter_must_have_one_digest():
    digests = tensor_digests({"embed": torch.ones(2), "head": torch.ones(2), "bias": torch.zeros(2)})
    assert differing_copies([digests], {"head": "embed"}) == ""
    assert differing_copies([digests], {"bias": "embed"}).startswith("bias and embed: two stages have a copy")
    other = tensor_digests({"embed": torch.zeros(2)})
    assert differing_copies([digests, other], {}).startswith("embed: two stages have a copy")
