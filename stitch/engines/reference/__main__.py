"""`python -m stitch.engines.reference`."""

from __future__ import annotations

import sys

from stitch.engines.reference.serve import main

sys.exit(main())
