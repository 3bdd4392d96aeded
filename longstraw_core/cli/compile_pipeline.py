"""Compiles a specification to the KFP pipeline: the same bytes for the same input."""

import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from longstraw_core.kubeflow.submission import MAX_PARAMETER_BYTES
from longstraw_core.spec import SpecError, TransactionSpec, canonical_json

KFP_PLACEHOLDER = "{{"
"""KFP (`{{$…}}`) and Argo below it (`{{workflow.…}}`) substitute placeholders inside parameter values; JSON itself has
no two braces that open one after the other."""

_RESERVED_PARAMETER_BYTES = 2_000
"""Room for the other parameters of the pipeline: names, resources, a node selector and a few tolerations."""


def spec_parameter(spec: TransactionSpec) -> str:
    """Return the specification as the pipeline's one JSON string parameter.

    Raises:
        SpecError: it is longer than KFP's limit for run parameters, or contains what KFP takes for a placeholder.
    """
    text = canonical_json(spec).decode("utf-8")
    if KFP_PLACEHOLDER in text:
        raise SpecError(f"the specification contains {KFP_PLACEHOLDER!r}, which KFP would replace; rename that path")
    size = len(text.encode("utf-8"))
    limit = MAX_PARAMETER_BYTES - _RESERVED_PARAMETER_BYTES
    if size > limit:
        raise SpecError(f"the specification has {size} bytes as JSON; KFP takes {limit}: shorten paths or lists")
    return text


def compile_pipeline(spec: TransactionSpec, transactions: int, lock: Mapping[str, str] | None = None) -> bytes:
    """Return the compiled pipeline (KFP IR, YAML) with the specification as its default parameter.

    Args:
        spec: The specification; its section `cluster` says what the pods get.
        transactions: How many transactions one run chains.
        lock: Image lock, name → `repository@sha256:…`; empty or None gives a pipeline for this machine only.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kfp import compiler

        from components.images import pipeline_images
        from pipelines.pods import PodSettings
        from pipelines.transaction import build_pipeline

        logging.getLogger("kfp").setLevel(logging.ERROR)
        pipeline = build_pipeline(
            transactions=transactions,
            exclusive_gpus=spec.schedule.exclusive_gpus,
            spec=spec_parameter(spec),
            run=spec.name,
            pods=PodSettings(spec.cluster, pipeline_images(dict(lock or {}))),
        )
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory) / "pipeline.yaml"
            compiler.Compiler().compile(pipeline, str(target))
            return target.read_bytes()
