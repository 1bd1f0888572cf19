"""``python -m cargohold``: the cargohold command."""

import sys

from cargohold.cli import main

sys.exit(main())
