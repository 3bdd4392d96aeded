"""Entry point of the `longstraw` command: one module per command, imported here."""

import click

from longstraw_core import __version__
from longstraw_core.cli.commands.cleanup import cleanup_command
from longstraw_core.cli.commands.compile import compile_command
from longstraw_core.cli.commands.doctor import doctor_command
from longstraw_core.cli.commands.gc import gc_command
from longstraw_core.cli.commands.gradients import gradients_command
from longstraw_core.cli.commands.lint import lint_command
from longstraw_core.cli.commands.logs import logs_command
from longstraw_core.cli.commands.model import model_group
from longstraw_core.cli.commands.parity import parity_command
from longstraw_core.cli.commands.plan import plan_command
from longstraw_core.cli.commands.rewards import rewards_group
from longstraw_core.cli.commands.run import run_command
from longstraw_core.cli.commands.sampler_node import sampler_node_command
from longstraw_core.cli.commands.schema import schema_command
from longstraw_core.cli.commands.stage import stage_group
from longstraw_core.cli.commands.status import cancel_command, status_command
from longstraw_core.cli.commands.submit import submit_command
from longstraw_core.cli.commands.verify import verify_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="longstraw")
def main() -> None:
    """GRPO post-training of LoRA adapters from very long shared prompts.

    \b
    Exit codes: 0 done, 2 usage or specification, 3 a stage failed, 10 data refused,
    11 integrity, 12 numeric, 13 incomplete, 75 try again, 130 interrupted.
    """


for _command in (
    run_command,
    compile_command,
    doctor_command,
    plan_command,
    lint_command,
    submit_command,
    status_command,
    logs_command,
    cancel_command,
    stage_group,
    sampler_node_command,
    verify_command,
    gc_command,
    cleanup_command,
    schema_command,
    model_group,
    rewards_group,
    gradients_command,
    parity_command,
):
    main.add_command(_command)
