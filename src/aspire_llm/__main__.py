"""`python -m aspire_llm`: the command line."""

import sys

from aspire_llm.cli import main

sys.exit(main())
