"""Compiles a specification to the KFP pipeline: the same bytes for the same input."""

import logging
import tempfile
import warnings
from pathlib import Path

from longstraw_core.spec import SpecError, TransactionSpec, canonical_json

MAX_PARAMETER_BYTES = 10_000
"""KFP's API server (2.17) refuses runs whose parameters are longer in all."""

_RESERVED_PARAMETER_BYTES = 1_000
"""Room for the other parameters of the pipeline."""


def spec_parameter(spec: TransactionSpec) -> str:
    """Return the specification as the pipeline's one JSON string parameter.

    Raises:
        SpecError: it is longer than KFP's limit for run parameters.
    """
    text = canonical_json(spec).decode("utf-8")
    size = len(text.encode("utf-8"))
    limit = MAX_PARAMETER_BYTES - _RESERVED_PARAMETER_BYTES
    if size > limit:
        raise SpecError(f"the specification has {size} bytes as JSON; KFP takes {limit}: shorten paths or lists")
    return text


def compile_pipeline(spec: TransactionSpec, transactions: int) -> bytes:
    """Return the compiled pipeline (KFP IR, YAML) with the specification as its default parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kfp import compiler

        from pipelines.transaction import build_pipeline

        logging.getLogger("kfp").setLevel(logging.ERROR)
        pipeline = build_pipeline(
            transactions=transactions,
            exclusive_gpus=spec.schedule.exclusive_gpus,
            spec=spec_parameter(spec),
            run=spec.name,
        )
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory) / "pipeline.yaml"
            compiler.Compiler().compile(pipeline, str(target))
            return target.read_bytes()
