"""The nine stages of a transaction: what each consumes, produces and needs; the one list that all code reads."""

from dataclasses import dataclass
from typing import get_args

from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.images import ImageRole
from longstraw_core.spec.receipts import StageName


@dataclass(frozen=True)
class StageEntry:
    """One row of the catalogue."""

    name: StageName
    image: ImageRole
    upstream: tuple[StageName, ...]
    """Stages whose receipts this one reads."""
    outputs: tuple[str, ...]
    """Names of the artifacts it publishes."""
    external: tuple[str, ...]
    """What it reads from outside the run."""
    purpose: str
    html_report: bool = False
    ranked: bool = False
    """Whether it runs on the specification's context-parallel ranks."""
    optional_outputs: tuple[str, ...] = ()
    """Names of artifacts that it publishes under some specifications only."""


CATALOGUE: dict[StageName, StageEntry] = {
    entry.name: entry
    for entry in (
        StageEntry(
            "audit_data",
            "control",
            (),
            ("prompts", "audit"),
            ("data file", "model snapshot", "parent checkpoint"),
            "Check every data row, tokenize, and select this transaction's prompts.",
        ),
        StageEntry(
            "export_lora",
            "trainer",
            ("audit_data",),
            ("adapter",),
            ("model snapshot", "parent checkpoint"),
            "Write the LoRA adapter that is sampled and trained: the parent checkpoint's, or a fresh one.",
            optional_outputs=("served",),
        ),
        StageEntry(
            "sample",
            "sampler",
            ("audit_data", "export_lora"),
            ("rollouts",),
            ("model snapshot",),
            "Sample a group of responses for every prompt with the adapter on.",
            optional_outputs=("server_log",),
        ),
        StageEntry(
            "score_rewards",
            "control",
            ("audit_data", "sample"),
            ("scored_groups", "statistics"),
            (),
            "Score every response and compute the groups' advantages.",
        ),
        StageEntry(
            "capture_prefix",
            "trainer",
            ("audit_data", "export_lora"),
            ("prefix",),
            ("model snapshot",),
            "Capture every prompt once, without autograd, into resident state.",
            ranked=True,
        ),
        StageEntry(
            "old_logprobs",
            "trainer",
            ("audit_data", "export_lora", "sample", "capture_prefix"),
            ("logprobs",),
            ("model snapshot",),
            "Compute the trainer's log-probabilities of every response before the update.",
            ranked=True,
        ),
        StageEntry(
            "train",
            "trainer",
            ("audit_data", "export_lora", "score_rewards", "capture_prefix", "old_logprobs"),
            ("checkpoint", "report", "rank_sessions"),
            ("model snapshot", "parent checkpoint"),
            "Replay every response with autograd, finalise the gradient once, take one optimizer step.",
            html_report=True,
            ranked=True,
        ),
        StageEntry(
            "manifest_checkpoint",
            "control",
            (
                "audit_data",
                "export_lora",
                "sample",
                "score_rewards",
                "capture_prefix",
                "old_logprobs",
                "train",
            ),
            ("checkpoint_manifest",),
            ("parent checkpoint",),
            "Re-hash the checkpoint and write the manifest of its every byte.",
        ),
        StageEntry(
            "validate_run",
            "control",
            (
                "audit_data",
                "export_lora",
                "sample",
                "score_rewards",
                "capture_prefix",
                "old_logprobs",
                "train",
                "manifest_checkpoint",
            ),
            ("evidence", "report"),
            (),
            "Re-hash everything this transaction wrote and state what its receipts prove.",
            html_report=True,
        ),
    )
}


def stage_entry(name: str) -> StageEntry:
    """Return the catalogue row of `name`; raise SpecError listing the stages if there is none."""
    for candidate in get_args(StageName):
        if candidate == name:
            return CATALOGUE[candidate]
    raise SpecError(f"unknown stage {name!r}; stages are {', '.join(CATALOGUE)}")
