"""The stage `validate_run` as a KFP component."""
