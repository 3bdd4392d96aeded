"""Kubernetes API servers for tests: a strict fake over HTTP, and the real one where its binaries are at hand."""
