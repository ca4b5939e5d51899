"""Ways in which weights arrive wrong: each changes what the trainer sends, a list of (name, tensor)."""

import torch

Parameters = list[tuple[str, torch.Tensor]]


def not_sent(parameters: Parameters, name: str) -> Parameters:
    """The place of the tensor keeps what was there: nothing yet."""
    return [
        (other, torch.zeros_like(tensor) if other == name else tensor)
        for other, tensor in parameters
    ]


def sent_twice(parameters: Parameters, name: str) -> Parameters:
    """The tensor also arrives in the place of another one of its shape."""
    twin = _twin(parameters, name)
    tensors = dict(parameters)
    return [(other, tensors[name if other == twin else other]) for other in tensors]


def swapped(parameters: Parameters, name: str) -> Parameters:
    """Two tensors of one shape arrive in each other's place."""
    twin = _twin(parameters, name)
    places = {name: twin, twin: name}
    tensors = dict(parameters)
    return [(other, tensors[places.get(other, other)]) for other in tensors]


def _twin(parameters: Parameters, name: str) -> str:
    tensors = dict(parameters)
    return next(
        other for other in tensors if other != name and tensors[other].shape == tensors[name].shape
    )


CORRUPTIONS = {function.__name__: function for function in (not_sent, sent_twice, swapped)}
