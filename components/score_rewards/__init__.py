"""The stage `score_rewards` as a KFP component."""
