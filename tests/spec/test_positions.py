"""YaRN as an explicit choice of the specification."""

import json

import pytest
from pydantic import ValidationError

from longstraw_core.spec import SpecError
from longstraw_core.spec.positions import YarnScaling, allowed_positions
from longstraw_core.spec.receipts import ReceiptPredicate
from longstraw_core.spec.transaction import ModelSpec


def test_without_scaling_the_native_positions_stand() -> None:
    assert ModelSpec(snapshot="m", family="qwen3_5_text").rope_scaling is None
    assert allowed_positions(1_048_576, None) == 1_048_576


def test_scaling_multiplies_the_models_own_positions_and_no_others() -> None:
    scaling = YarnScaling(type="yarn", factor=2.0, original_positions=1_048_576)
    assert allowed_positions(1_048_576, scaling) == 2_097_152
    with pytest.raises(SpecError, match="is 1048576, the snapshot's max_position_embeddings is 4096"):
        allowed_positions(4096, scaling)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "linear", "factor": 2.0, "original_positions": 8},
        {"type": "yarn", "factor": 1.0, "original_positions": 8},
        {"type": "yarn", "factor": 2.0},
        {"type": "yarn", "factor": 2.0, "original_positions": 8, "beta_slow": 32.0},
        {"type": "yarn", "factor": 2.0, "original_positions": 8, "attention_factor": 1.0},
    ],
)
def test_anything_but_a_complete_yarn_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        YarnScaling.model_validate_json(json.dumps(fields), strict=True)


def test_the_receipt_has_a_field_for_it() -> None:
    assert ReceiptPredicate.model_fields["rope_scaling"].default is None
