"""The stage `sample` as a KFP component."""
