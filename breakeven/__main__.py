"""`python -m breakeven`."""

from breakeven.studies.cli import main

main()
