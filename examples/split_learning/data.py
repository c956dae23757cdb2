"""The images of `images.py` as a plan's data: `batches` for a machine with the images, `labels` for one with labels."""

import images
import torch
from torch import Tensor

from stageline import Batch, Source


class Images:
    """Images 0 to `count` - 1, the last tenth of which is held out. Each epoch has an order of its own, by the seed.

    With `share`, (1, 3) for example, only every third image from number 1 on: the data of one of three clients.
    """

    def __init__(
        self, batch_size: int, seed: int, size: int = 224, count: int = 5120, share: tuple[int, int] = (0, 1)
    ) -> None:
        own = torch.arange(share[0], count, share[1])
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.seen, self.kept = own[: len(own) - len(own) // 10], own[len(own) - len(own) // 10 :]
        self.steps_per_epoch = -(-len(self.seen) // batch_size)

    def batch(self, step: int) -> Batch:
        """float32 [rows, 3, size, size] and int64 [rows]."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.seen), generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        return self.drawn(self.seen[order[place * self.batch_size :][: self.batch_size]])

    def held_out(self) -> Source:
        return Kept(self)

    def drawn(self, numbers: Tensor) -> Batch:
        return images.draw(numbers, self.size), images.digits_of(numbers)


class Labels(Images):
    """The same batches without images: in the place of inputs are the labels once more, which are not used."""

    def drawn(self, numbers: Tensor) -> Batch:
        return images.digits_of(numbers), images.digits_of(numbers)


class Kept:
    """The images that are held out, in their order, drawn batch by batch."""

    def __init__(self, of: Images) -> None:
        self._of = of
        self.steps_per_epoch = max(1, -(-len(of.kept) // of.batch_size))

    def batch(self, step: int) -> Batch:
        size = self._of.batch_size
        return self._of.drawn(self._of.kept[step % self.steps_per_epoch * size :][:size])

    def held_out(self) -> None:
        return None


batches = Images
labels = Labels
