"""The base of every specification and record model: frozen, closed, strict; and the integers JSON can carry."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAX_JSON_INTEGER = 2**53 - 1
"""Largest integer that every JSON reader keeps exactly (RFC 8785 and RFC 7493, I-JSON)."""

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_JSON_INTEGER)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=MAX_JSON_INTEGER)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
PathText = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A path or URI: no control characters, no longer than a file system takes."""
Sha256 = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class StrictModel(BaseModel):
    """Immutable model that refuses unknown fields, so that a misspelt key is an error and not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def to_json_object(self) -> dict[str, Any]:
        """Return plain JSON types (lists, dicts, strings, numbers, booleans, null)."""
        return self.model_dump(mode="json")
