"""A small convolutional net for 8x8 images of digits. Every machine has this file."""

from torch import Tensor, float32, nn


def build(width: int = 24) -> nn.Sequential:
    """float32 images [rows, 1, 8, 8] -> a score for each digit, float32 [rows, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * width, 10),
    )


def accuracy(scores: Tensor, digits: Tensor) -> Tensor:
    """The share of images whose highest score is their digit's."""
    return (scores.argmax(dim=1) == digits).to(float32).mean()
