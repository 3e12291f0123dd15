"""`python -m stitch`: the same as the `stitch` command."""

from stitch.cli.main import main

main()
