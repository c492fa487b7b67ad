"""Fetching, naming and listing model files under `$PRISM_HOME/models`."""

from __future__ import annotations

from ops.models.catalog import CatalogEntry, Wheel, catalog
from ops.models.library import LocalModel, local_models, resolve
from ops.models.pull import pull

__all__ = ["CatalogEntry", "LocalModel", "Wheel", "catalog", "local_models", "pull", "resolve"]
