"""The stage `train` as a KFP component."""
