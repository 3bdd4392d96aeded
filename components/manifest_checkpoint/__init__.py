"""The stage `manifest_checkpoint` as a KFP component."""
