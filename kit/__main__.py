"""``python -m kit`` is the command ``kit``."""

from __future__ import annotations

import sys

from kit.cli.steps import main

sys.exit(main())
