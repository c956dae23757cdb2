"""torchvision's ResNet-18 under torchvision's names, narrower: its wheel does not go with this torch."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + identity)


class ResNet(nn.Module):
    def __init__(self, width: int, blocks: int, labels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _group(width, width, blocks, 1)
        self.layer2 = _group(width, 2 * width, blocks, 2)
        self.layer3 = _group(2 * width, 4 * width, blocks, 2)
        self.layer4 = _group(4 * width, 8 * width, blocks, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, labels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


ResNet.__module__ = "torchvision.models.resnet"


def resnet18(width: int = 64, labels: int = 1000) -> ResNet:
    return ResNet(width, 2, labels)


def _group(inside: int, outside: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inside, outside, stride)
    rest = [BasicBlock(outside, outside, 1) for _ in range(blocks - 1)]
    return nn.Sequential(OrderedDict((str(number), block) for number, block in enumerate([first, *rest])))
