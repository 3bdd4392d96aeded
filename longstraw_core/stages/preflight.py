"""Cheap checks before a run starts: everything that can be refused without computing is refused here."""

from pathlib import Path

from longstraw_core.rewards.prompt_tokens import prompt_token_limit, read_model_limits
from longstraw_core.rewards.scoring import check_reward
from longstraw_core.rollout.adapter_rules import check_lora_before_start
from longstraw_core.rollout.server_command import check_server_arguments
from longstraw_core.spec import DataRefused, SpecError, TransactionSpec
from longstraw_core.stages.layout_check import check_layout
from longstraw_core.stages.snapshot import check_snapshot


def check_before_start(spec: TransactionSpec) -> None:
    """Check that snapshot and data file are there, and that the layout and the lengths fit the model.

    Raises:
        SpecError: naming the file or field; also when the reward plug-in cannot be imported, or SGLang could not serve
            the adapter.
        DataRefused: the data file is empty.
    """
    snapshot, rows = Path(spec.model.snapshot), Path(spec.data.path)
    check_snapshot(snapshot, spec.model.family)
    check_layout(snapshot, spec.model.family, spec.layout)
    limits = read_model_limits(snapshot, spec.model.rope_scaling)
    prompt_token_limit(spec.data, limits, spec.sampling.max_response_tokens)
    if not rows.is_file():
        raise SpecError(f"data.path: {rows} is not a file")
    if rows.stat().st_size == 0:
        raise DataRefused(f"{rows}: the file is empty; it must hold one JSON row per line")
    check_reward(spec.reward)
    if spec.sampling.engine == "sglang":
        check_server_arguments(spec.sampling.server.arguments)
        if not spec.sampling.server.merge:
            check_lora_before_start(spec.lora, spec.model.family)
