"""Sampling of responses with the adapter on."""
