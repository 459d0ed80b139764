"""`python -m flce.bench …`."""

import sys

from flce.bench._cli import main

sys.exit(main())
