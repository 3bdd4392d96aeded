"""Data audit, rewards and group advantages; pure Python that must not import torch."""
