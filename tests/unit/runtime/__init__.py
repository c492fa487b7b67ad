"""Tests of the Runtime, its samplers and what they are made of."""
