"""Things that happen at stages of the loop."""

from __future__ import annotations
