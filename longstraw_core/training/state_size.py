"""Size of the resident state from a snapshot's configuration alone: nothing is loaded or allocated."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw_core.engine.policy import state_bytes
from longstraw_core.mixers.families import bind_family
from longstraw_core.mixers.family import StateBytes
from longstraw_core.spec import TransactionSpec
from longstraw_core.training.model import DTYPES


def estimate_state_bytes(snapshot: Path, spec: TransactionSpec, prompt_tokens: int) -> StateBytes:
    """Return the bytes that one prompt's resident state takes with this specification.

    Args:
        snapshot: Directory of the base model; only its configuration is read.
        spec: Gives data type, page size, chunk size and gradient mode.
        prompt_tokens: Length of the prompt, in tokens, at least 1.
    """
    config = AutoConfig.from_pretrained(snapshot, local_files_only=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[spec.model.dtype])
    layout = spec.layout
    family = bind_family(model, page_tokens=layout.page_tokens, selection_record=layout.selection_record)
    return state_bytes(family.layers, layout, spec.objective.gradient, prompt_tokens)
