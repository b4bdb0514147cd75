"""`python -m weft` is the `weft` command."""

from weft.cli.app import main

main()
