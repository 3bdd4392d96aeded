"""The `longstraw` command."""
