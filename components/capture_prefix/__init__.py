"""The stage `capture_prefix` as a KFP component."""
