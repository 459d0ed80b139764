"""`python -m flce …`: the flce command."""

from flce._command import main

main()
