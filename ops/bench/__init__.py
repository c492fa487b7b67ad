"""Benchmarks, chaos and the makers of synthetic models; nothing here is imported by the product."""
