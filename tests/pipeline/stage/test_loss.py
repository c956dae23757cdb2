"""A loss is one number."""

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import LossNotScalar
from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_loss_that_is_not_one_number_is_refused_with_its_shape():
    stage = Stage(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(LossNotScalar, match=r"float32 \[2\]"):
        stage.forward(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
