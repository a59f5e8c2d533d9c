# SPDX-License-Identifier: Apache-2.0
"""Makes `layout` importable, and the flat modules where no package is named. The markers are in pyproject.toml."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import layout

layout.extend_path()
