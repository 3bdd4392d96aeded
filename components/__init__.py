"""KFP components, one folder per stage: typed shims over `longstraw_core.stages`, no logic."""
