"""A stage that takes and gives a tree."""

from torch import nn


class TwoTowers(nn.Module):
    """Takes and gives a tree: a mask and a flag travel along, two activations carry gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: dict) -> dict:
        a, b = x["towers"]
        return {"towers": (self.left(a), self.right(b)), "mask": x["mask"], "flag": x["flag"], "none": None}
