"""Builds the tiny checkpoint: the one name that the command line imports; the parts are in `tiny/`."""

from longstraw_core.training.tiny.model import TinyProgress, TinyReport, build_tiny_model

__all__ = ["TinyProgress", "TinyReport", "build_tiny_model"]
