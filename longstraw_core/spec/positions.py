"""Positional scaling as an explicit choice: without it a model's own positions are used and nothing is changed."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.model import FiniteFloat, PositiveCount, StrictModel


class YarnScaling(StrictModel):
    """YaRN (arXiv 2309.00071), applied identically to sampler and trainer."""

    type: Literal["yarn"]
    factor: Annotated[FiniteFloat, Field(gt=1.0)]
    """Positions that exist afterwards, as a multiple of the model's own."""
    original_positions: PositiveCount
    """The model's own positions (`max_position_embeddings`); must equal what the snapshot says."""
    beta_fast: Annotated[FiniteFloat, Field(gt=0.0)] = 32.0
    """Dimensions that turn more often than this over the original positions are left as they are."""
    beta_slow: Annotated[FiniteFloat, Field(gt=0.0)] = 1.0
    """Dimensions that turn less often than this are interpolated by the whole factor."""

    @model_validator(mode="after")
    def _ordered(self) -> "YarnScaling":
        if self.beta_slow >= self.beta_fast:
            raise ValueError("beta_slow must be below beta_fast")
        return self

    @property
    def positions(self) -> int:
        """Positions that exist with this scaling."""
        return math.floor(self.original_positions * self.factor)


def allowed_positions(native: int, scaling: YarnScaling | None) -> int:
    """Return the positions a model with `native` ones can be fed under `scaling`.

    Raises:
        SpecError: the scaling was written for a model with other native positions.
    """
    if scaling is None:
        return native
    if scaling.original_positions != native:
        raise SpecError(
            f"model.rope_scaling.original_positions is {scaling.original_positions}, "
            f"the snapshot's max_position_embeddings is {native}: scaling must start from the model's own positions"
        )
    return scaling.positions
