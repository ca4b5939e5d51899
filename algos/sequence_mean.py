"""Means over the tokens of each sequence, for losses that weigh or clip a sequence as a whole."""

from torch import Tensor


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the mean of `values` [N] over its own sequence, [N]; carries gradient.

    sequence_ids as in LossInputs. The exponential of a mean log-ratio is the geometric mean of the ratios.
    """
    num_sequences = int(sequence_ids.max()) + 1
    totals = values.new_zeros(num_sequences).index_add(0, sequence_ids, values)
    lengths = sequence_ids.bincount(minlength=num_sequences)
    return (totals / lengths)[sequence_ids]
