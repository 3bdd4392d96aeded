"""What a captured prompt state belongs to: it may be used with exactly this model, adapter, prompt and mode."""

from collections.abc import Sequence
from typing import Literal

from longstraw_core.spec.canonical import canonical_json, sha256_digest
from longstraw_core.spec.model import Sha256, StrictModel
from longstraw_core.spec.positions import YarnScaling
from longstraw_core.spec.receipts import GradientMode


class PrefixIdentity(StrictModel):
    """The fields that must agree before a stored state is used."""

    snapshot_digest: Sha256
    """Tree digest of the base model."""
    adapter_digest: Sha256 | None
    """Tree digest of the adapter the prompt was captured with; None when it was captured with the adapter off."""
    prompt_digest: Sha256
    """`prompt_token_digest` of the prompt's token ids."""
    gradient: GradientMode
    reference: bool
    """Whether this is the state of the reference policy."""
    rope_scaling: YarnScaling | None = None
    """The positions its keys were rotated by; None for the model's own."""
    quantization: Literal["nf4"] | None = None
    """How the base model's weights were kept when it was captured."""


def prompt_token_digest(token_ids: Sequence[int]) -> str:
    """Return the digest of the canonical JSON array of the token ids."""
    return sha256_digest(canonical_json([int(token) for token in token_ids]))
