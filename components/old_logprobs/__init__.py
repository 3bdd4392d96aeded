"""The stage `old_logprobs` as a KFP component."""
