"""Reads the final answer of a response as mathematics and compares it with a ground truth; never runs text as code."""
