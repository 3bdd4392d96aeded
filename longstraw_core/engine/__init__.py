"""The layer loop over resident state: capture, replay, reverse sweep, chunked head and the GRPO objective."""
