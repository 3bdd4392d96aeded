"""LongStraw on Kubeflow: GRPO post-training of LoRA adapters from very long shared prompts."""

__version__ = "0.1.0"
