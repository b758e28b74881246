"""In which dtype each term is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The dtype of each term of the training state.

    weights: the parameters that forward and backward use.
    gradients: the kept gradients, and what the reduction sends.
    master: the copy that the optimizer updates. Equal to `weights`: no second copy is kept.
    Moments follow the master. Module buffers are left as they are.
    """

    weights: torch.dtype = torch.bfloat16
    gradients: torch.dtype = torch.bfloat16
    master: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "master"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise TypeError(f"Precision.{name} is {dtype!r}; it must be a floating-point torch.dtype")

    @classmethod
    def full(cls) -> Precision:
        """fp32 throughout: 16 bytes per parameter with Adam, no second copy of the weights."""
        return cls(torch.float32, torch.float32, torch.float32)

    @classmethod
    def of(cls, dtype: torch.dtype) -> Precision:
        """The default for a parameter that the user made in `dtype`: a 16-bit one gets an fp32 master."""
        return cls(dtype, dtype, torch.promote_types(dtype, torch.float32))
