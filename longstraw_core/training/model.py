"""Loads the frozen base model and its adapter; refuses snapshots with missing or misshapen tensors."""

import os
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, GenerationConfig

from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.families import bind_family
from longstraw_core.spec.errors import IntegrityError, LongStrawError, SpecError
from longstraw_core.spec.positions import YarnScaling, allowed_positions
from longstraw_core.spec.transaction import LayoutSpec, LoraSpec, ModelSpec
from longstraw_core.training.base_weights import Keeping, load_weights
from longstraw_core.training.lora import load_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def use_deterministic_arithmetic() -> None:
    """Make repeated runs on the same device equal: no TF32, no autotuned and no non-deterministic kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keeping(model_spec: ModelSpec, layout: LayoutSpec, context: RankGroup) -> Keeping | None:
    """Return how the ranks of an engine keep frozen weights, None for weights that are whole on every rank."""
    nf4 = model_spec.quantization == "nf4"
    sharded = layout.base_weights == "sharded" and context.size > 1
    return Keeping(context if sharded else ALONE, nf4) if sharded or nf4 else None


def load_base_model(
    snapshot_dir: Path,
    model_spec: ModelSpec,
    *,
    device: str = "cpu",
    experts: RankGroup = ALONE,
    kept: Keeping | None = None,
) -> Any:
    """Load a Hugging Face snapshot (safetensors only) in evaluation mode, frozen.

    Args:
        experts: the ranks that share the experts; only this rank's are loaded.
        kept: how the layers' matrices are kept; None loads them whole, whatever `model_spec` says. Only the engine can
            use a model of which they are not whole.

    Raises:
        SpecError: no snapshot, a model of another family, or NF4 is not possible here.
        IntegrityError: a tensor is missing or has another shape than the configuration says.
    """
    use_deterministic_arithmetic()
    if not (snapshot_dir / "config.json").is_file():
        raise SpecError(f"model.snapshot: {snapshot_dir} has no config.json")
    try:
        config = AutoConfig.from_pretrained(snapshot_dir, local_files_only=True)
    except Exception as error:  # transformers raises many types here, from OSError to those of its own validation
        raise SpecError(f"model.snapshot: {snapshot_dir}/config.json cannot be read: {_first_line(error)}") from error
    if config.model_type not in (model_spec.family, model_spec.family.removesuffix("_text")):
        raise SpecError(f"model.snapshot: {snapshot_dir} is a {config.model_type} model, not {model_spec.family}")
    if getattr(config, "quantization_config", None) is not None:
        raise SpecError(f"model.snapshot: {snapshot_dir} is quantised; use the snapshot in bfloat16 or float32")
    if model_spec.rope_scaling is not None:
        _scale_positions(config.get_text_config(), model_spec.rope_scaling)
    try:
        model = load_weights(
            snapshot_dir, config, dtype=DTYPES[model_spec.dtype], device=device, experts=experts, keeping=kept
        )
    except LongStrawError:
        raise
    except Exception as error:  # a configuration of odd values makes the constructors of transformers raise anything
        raise IntegrityError(f"model.snapshot: {snapshot_dir} cannot be loaded: {_first_line(error)}") from error
    if (snapshot_dir / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(snapshot_dir, local_files_only=True)
    model.eval()
    bind_family(model, page_tokens=1)
    return model


def load_policy_model(
    snapshot_dir: Path,
    adapter_dir: Path,
    model_spec: ModelSpec,
    *,
    lora: LoraSpec | None = None,
    device: str = "cpu",
    experts: RankGroup = ALONE,
    kept: Keeping | None = None,
) -> PeftModel:
    """Load the base model and a stored adapter.

    Args:
        experts, kept: as `load_base_model`.
        lora: when given, the adapter must have this rank, alpha and these targets.

    Raises:
        SpecError, IntegrityError: as `load_base_model` and `longstraw_core.training.lora.load_adapter`.
    """
    base = load_base_model(snapshot_dir, model_spec, device=device, experts=experts, kept=kept)
    return load_adapter(base, adapter_dir, expected=lora, held=experts)


def _scale_positions(config: Any, scaling: YarnScaling) -> None:
    """Write the scaling into the configuration that both transformers and the engine's rotary embedding read."""
    rope: dict[str, Any] = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise SpecError(f"model.rope_scaling: the snapshot already has rope type {kind!r}; remove model.rope_scaling")
    positions = allowed_positions(config.max_position_embeddings, scaling)
    config.rope_parameters = rope | {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    config.max_position_embeddings = positions


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    known = isinstance(error, OSError | ValueError | RuntimeError)
    return lines[0] if known and lines[0] else f"{type(error).__name__}: {' '.join(' '.join(lines).split())[:200]}"
