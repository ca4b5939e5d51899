"""Sums and means over the tokens of each sequence, for losses that weigh or clip a sequence as a whole."""

from torch import Tensor


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the mean of `values` [N] over its own sequence, [N]; carries gradient.

    sequence_ids as in LossInputs. The exponential of a mean log-ratio is the geometric mean of the ratios.
    """
    return sequence_sum(values, sequence_ids) / sequence_ids.bincount()[sequence_ids]


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the sum of `values` [N] over its own sequence, [N]; carries gradient.

    sequence_ids as in LossInputs. The exponential of a sum of log-ratios is the ratio of the whole sequence.
    """
    totals = values.new_zeros(int(sequence_ids.max()) + 1).index_add(0, sequence_ids, values)
    return totals[sequence_ids]
