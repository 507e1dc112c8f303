"""The module of small models, under the name that tests use."""

from __future__ import annotations

import random_models as table

__all__ = ["table"]
