"""The Markdown summary that every stage leaves in the KFP UI, made from its receipt alone."""

from longstraw_core.spec import StageReceipt
from longstraw_core.stages.catalogue import stage_entry
from longstraw_core.stages.report import markdown_summary


def summarise(receipt: StageReceipt) -> str:
    """Markdown with what the stage did, measured and published."""
    predicate = receipt.predicate
    rows: list[tuple[str, object]] = [
        ("purpose", stage_entry(predicate.stage).purpose),
        ("run", predicate.run),
        ("transaction", predicate.transaction),
        ("status", predicate.status),
        ("gradient mode", predicate.gradient),
    ]
    rows += sorted(predicate.facts.items())
    rows += [(name, f"{value:.6g}") for name, value in sorted(predicate.metrics.items())]
    for rank in predicate.ranks:
        rows += [
            (
                f"rank {rank.rank}: {phase.name}",
                f"{phase.seconds:.2f} s, peak {phase.peak_memory_bytes / 2**20:.0f} MiB",
            )
            for phase in rank.phases
        ]
    rows += [
        (f"output {name}", f"{descriptor.digest} ({descriptor.size} bytes)")
        for name, descriptor in sorted(predicate.outputs.items())
    ]
    return markdown_summary(predicate.stage, rows)
