"""`python -m longstraw_core.cli` is the `longstraw` command."""

from longstraw_core.cli.main import main

main(prog_name="longstraw")
