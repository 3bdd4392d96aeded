"""A multimodal snapshot, as they are published, around the weights of a text snapshot."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration


def write_multimodal(text: Path, directory: Path) -> Path:
    """Write the same language model with a small random vision part beside it, under the wrapper's names."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(
        text_config=json.loads((text / "config.json").read_text()),
        vision_config=vision,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        tie_word_embeddings=True,
    )
    Qwen3_5ForConditionalGeneration(config).float().save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in load_file(text / "model.safetensors").items():
        wrapped = name.replace("model.", "model.language_model.", 1)
        assert weights[wrapped].shape == tensor.shape
        weights[wrapped] = tensor
    # a layer for speculative decoding, whose names end like those of the language model
    weights["mtp.layers.0.self_attn.q_proj.weight"] = (
        weights["model.language_model.layers.1.self_attn.q_proj.weight"] * 2
    )
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(text / name, directory / name)
    return directory
