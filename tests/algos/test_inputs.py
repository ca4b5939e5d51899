import torch
from loss_inputs import random_inputs, select

from algos.inputs import joined


def test_micro_batches_without_gradient_are_joined_to_the_update_that_they_are_of():
    inputs = random_inputs(tokens_per_sequence=15)
    places = torch.arange(60)
    parts = [select(inputs, places < 30), select(inputs, places < 0), select(inputs, places >= 30)]
    update = joined([part.to("cpu") for part in parts])
    for name in inputs.__dataclass_fields__:
        column = getattr(update, name)
        assert torch.equal(column, getattr(inputs, name)) and not column.requires_grad
