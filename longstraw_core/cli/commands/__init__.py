"""One module per `longstraw` command."""
