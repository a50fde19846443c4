"""The one-dimensional CNN for reads of DNA (Ren et al. 2019; the paper's genomics experiment).

    codes (N, T) in {0, 1, 2, 3} -> one-hot -> `conv`: filters of 20 bases -> max over positions -> relu -> dropout
                                 -> `dense` -> relu                       paper: 2000 filters, 2000 dense units

ReLU and maximum commute, so we take the maximum first. Departure: the paper's dropout sets whole channels of the
*input* to zero, one of four bases; ours drops filters, after the maximum, where each is one number.

The maximum passes its gradient to one position of a read, so a dense backward pass would mostly multiply by zero. In
training we first find that position without gradients, then take the filter's response there once more, as a sum of 20
weights that the bases pick: the same value and the same gradient (positions tie where the read repeats itself, and then
they pick the same weights), at a third of the time or less. Reads are convolved a few at a time, so that responses stay
in the processor's cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASES = 4
_READS_AT_ONCE = 16


class GenomicsCNN(nn.Module):
    """Codes (N, T), A0 C1 G2 T3 -> hidden vectors (N, dense)."""

    def __init__(self, *, filters: int = 2000, width: int = 20, dense: int = 2000, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(BASES, filters, width)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(filters, dense)
        self.width, self.out_features = width, dense

    def forward(self, codes: Tensor) -> Tensor:
        if codes.dim() != 2 or codes.is_floating_point() or codes.shape[1] < self.width:
            raise ValueError(
                f"GenomicsCNN expects reads (N, T) of base codes 0 to 3, T at least {self.width}, "
                f"got {codes.dtype} {tuple(codes.shape)}."
            )
        return F.relu(self.dense(self.dropout(F.relu(self.max_response(codes.long())))))

    def max_response(self, codes: Tensor) -> Tensor:
        """The largest response (N, filters) of each filter along each read."""
        if torch.compiler.is_compiling():  # an exported graph takes any number of reads at once
            return self.conv(F.one_hot(codes, BASES).to(self.conv.weight.dtype).transpose(1, 2)).amax(2)
        parts = F.one_hot(codes, BASES).to(self.conv.weight.dtype).transpose(1, 2).split(_READS_AT_ONCE)
        if not torch.is_grad_enabled():
            return torch.cat([self.conv(part).amax(2) for part in parts])
        with torch.no_grad():
            position = torch.cat([self.conv(part).argmax(2) for part in parts])
        windows = codes.unfold(1, self.width, 1)
        picked = windows.gather(1, position[..., None].expand(-1, -1, self.width))  # (N, filters, width)
        weight, bias = self.conv.weight.expand(len(codes), -1, -1, -1), self.conv.bias
        assert bias is not None
        return weight.gather(2, picked[:, :, None]).sum((2, 3)) + bias
