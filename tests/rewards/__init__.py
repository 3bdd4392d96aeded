"""Tests of the data audit, rewards and group advantages."""
