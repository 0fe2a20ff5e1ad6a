"""`python -m opdrift` is the command `opdrift`."""

import sys

from opdrift.commands.main import opdrift

if __name__ == "__main__":
    sys.exit(opdrift())
